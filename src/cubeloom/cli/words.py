"""Parses a command line: separates a command's own options from settings of its settings file."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable

from cubeloom.base import dtypes
from cubeloom.base.errors import UserError
from cubeloom.base.settings import all_settings

# Commands for which `--steps 5` is a setting of the file, as `--grid.x 2` is for all.
TAKE_A_FILE = ("train", "launch")


def split(name: str, arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """A command's own words, and settings as `--a.b=c`: those with a dot or, for some commands, any field of a job."""
    fields = _fields() if name in TAKE_A_FILE else set()
    own: list[str] = []
    settings: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        path = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or not ("." in path or path in fields):
            own.append(word)
            continue
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else _alone(option, path)
        settings.append(f"--{path}={value}")
    return in_full(own), tuple(settings)


def _fields() -> set[str]:
    """The fields of a job, including sections such as grid."""
    from cubeloom.train.job.job import Job  # imported here, so that commands without a file start sooner

    return {*Job.SHORT, *(field.name for field in dataclasses.fields(Job))}


def _alone(option: str, path: str) -> str:
    """The value of a setting that has none on the command line."""
    from cubeloom.train.job.job import Job

    kinds = {each.name: each.type for each in all_settings(Job)}
    if kinds.get(path) == "true or false":
        return "true"
    raise UserError(
        f"{option} needs a value, as {option} VALUE or {option}=VALUE; `cubeloom settings` lists all of them"
    )


def in_full(words: list[str]) -> list[str]:
    """With torch's names of dtypes: `--dtype bf16` is `--dtype bfloat16`."""
    found = list(words)
    for place, word in enumerate(words):
        if word.startswith("--dtype="):
            found[place] = f"--dtype={dtypes.full_name(word.removeprefix('--dtype='))}"
        elif place and words[place - 1] == "--dtype":
            found[place] = dtypes.full_name(word)
    return found


def refuse_unknown(name: str, known: set[str], words: list[str]) -> None:
    """Raises UserError for an unknown option, with the nearest that the command or a file accepts."""
    for word in words:
        option = word.partition("=")[0].replace("_", "-")
        if not option.startswith("--") or option in known or option == "--":
            continue
        legal = known | _settings() if name in TAKE_A_FILE else known
        by_last = {f"--{each.rpartition('.')[2].lstrip('-')}": each for each in sorted(legal)}
        near = difflib.get_close_matches(option, [*legal, *by_last], 1)
        hint = f"; did you mean {by_last.get(near[0], near[0])}?" if near else "."
        more = ", `cubeloom settings` all settings" if name in TAKE_A_FILE else ""
        raise UserError(f"unknown option {option}{hint} `cubeloom {name} --help` lists the options{more}")


def _settings() -> set[str]:
    from cubeloom.train.job.job import Job

    return {f"--{each}" for each in (*(each.name for each in all_settings(Job) if "[]" not in each.name), *Job.SHORT)}


def with_overrides(command: Callable[[], int], overrides: tuple[str, ...]) -> Callable[[], int]:
    if not hasattr(command, "overrides"):
        raise UserError(f"{overrides[0]} is a setting of a file, and this command takes no file")
    if getattr(command, "file", command) is None:
        raise UserError(f"{overrides[0]} is a setting of a file, and no FILE was given")
    return dataclasses.replace(command, overrides=overrides)  # type: ignore[type-var]
