"""The command line: one file a command, each a frozen dataclass of its options that is called to run.

Only the command that is given is imported: some need torch, which takes seconds, and some do not.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from operator import or_
from typing import Annotated, Any

import tyro

from cubeloom.base.errors import UserError
from cubeloom.base.files import FULL
from cubeloom.base.host import version

# Each lies in the module of its name, as a class of its name.
COMMANDS = (
    "train",
    "sample",
    "evaluate",
    "report",
    "convert",
    "plan",
    "rehearse",
    "reproduce",
    "verify",
    "schedule",
    "launch",
    "doctor",
    "calibrate",
    "validate",
    "models",
    "data",
)
# Those with commands of their own, of which tyro knows no words.
DESCRIPTIONS = {
    "data": "Make and check folders of tokens.",
    "launch": "Write the script or manifest that trains a job on a cluster.",
}
# Those where `--steps=5` is a setting of the file, as `--grid.x=2` is everywhere.
TAKE_A_FILE = ("train", "launch")


def main() -> None:
    """Train neural networks that are too large for one device. --version says which version this is."""
    # Exit 0 if the command succeeded, 1 if what it checked does not hold, 2 if its input cannot work, 130 after Ctrl-C.
    with _errors_in_one_line():
        sys.exit(_run(sys.argv[1:]))


def _run(given: list[str]) -> int:
    if given == ["--version"]:
        print(f"cubeloom {version('cubeloom') or 'of no version: it is not installed'}")
        return 0
    arguments, overrides = split(given or ["--help"])
    if arguments[:1] and arguments[0] in COMMANDS:
        name, *rest = arguments
        kind, program, about = _class(name), f"cubeloom {name}", DESCRIPTIONS.get(name)
    else:  # all of them, to be listed
        kind, program, about, rest = reduce(or_, map(_choice, COMMANDS)), "cubeloom", main.__doc__, arguments
    command: Callable[[], int] = tyro.cli(
        tyro.conf.OmitSubcommandPrefixes[kind],  # type: ignore[valid-type, misc]
        prog=program,
        description=about,
        args=rest,
    )
    if overrides:
        command = with_overrides(command, overrides)
    return command()


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """What a user did, or a disk that is full, is no reason to show a trace."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, where it can still be said that it failed
    except UserError as error:
        print(f"cubeloom: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("cubeloom: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # who reads the output has seen enough, as `head` has
        _forget_output()
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno not in FULL:
            raise
        _forget_output()
        print(f"cubeloom: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _forget_output() -> None:
    """Python writes what is left when it ends, and would fail once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


def _class(name: str) -> Any:
    return getattr(import_module(f"cubeloom.cli.{name}"), name.capitalize())


def _choice(name: str) -> Any:
    return Annotated[_class(name), tyro.conf.subcommand(name, description=DESCRIPTIONS.get(name))]


def split(arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """A command's own options, and settings of its file: those with a dot or, as `--steps=5`, a field of a job."""
    fields = _fields_of_a_job() if arguments[:1] and arguments[0] in TAKE_A_FILE else set()

    def is_setting(argument: str) -> bool:
        name = argument.removeprefix("--").partition("=")[0]
        return argument.startswith("--") and ("." in name or name in fields)

    for argument, after in zip(arguments, [*arguments[1:], "--"], strict=True):
        if is_setting(argument) and "=" not in argument:
            value = "…" if after.startswith("--") else after
            raise UserError(f"{argument} is a setting of a file, and is given in one word: {argument}={value}")
    return [each for each in arguments if not is_setting(each)], tuple(filter(is_setting, arguments))


def _fields_of_a_job() -> set[str]:
    return {field.name for field in dataclasses.fields(import_module("cubeloom.train.job").Job)}


def with_overrides(command: Callable[[], int], overrides: tuple[str, ...]) -> Callable[[], int]:
    if not hasattr(command, "overrides"):
        raise UserError(f"{overrides[0]} is a setting of a file, and this command takes no file")
    if getattr(command, "file", command) is None:
        raise UserError(f"{overrides[0]} is a setting of a file, and no FILE was given")
    return dataclasses.replace(command, overrides=overrides)  # type: ignore[type-var]
