"""`cubeloom settings`: prints all settings of a settings file."""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from cubeloom.base.errors import UserError
from cubeloom.base.settings import Section, Setting, sections
from cubeloom.train.job.job import Job

_WIDTH = 80


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Print every setting of a job with its type, default, choices and meaning.

    In a file a setting is in its section; on the command line it is `--section.name value`.
    """

    section: tyro.conf.Positional[str | None] = None
    """Only this section, such as optimizer; or one setting, such as optimizer.clip."""
    markdown: bool = False
    """Print the page docs/settings.md."""
    json: Annotated[bool, tyro.conf.arg(aliases=["-j"])] = False
    """Print one JSON object: a list of all settings."""

    def __call__(self) -> int:
        found = _chosen(self.section)
        if self.json:
            print(json.dumps({"settings": [{"section": s.name, **asdict(each)} for s in found for each in s.settings]}))
        elif self.markdown:
            print(as_page(found))
        else:
            print("\n\n".join("\n".join(_lines(section)) for section in found))
        return 0


def _chosen(name: str | None) -> list[Section]:
    every = sections(Job)
    if name is None:
        return every
    plain = name.strip("[]").removeprefix("--").replace("-", "_")
    plain = Job.SHORT.get(plain, plain)
    found = [each for each in every if each.name.removesuffix("[]") == plain]
    for section in every:
        one = tuple(each for each in section.settings if each.name == plain)
        found += [Section(section.name, section.meaning, one)] if one else []
    if not found:
        known = [each.name for each in every if each.name]
        names = [*known, *(each.name for section in every for each in section.settings)]
        near = difflib.get_close_matches(plain, names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UserError(f"there is no section or setting {name!r}{hint} The sections are {', '.join(known)}")
    return found


def _lines(section: Section) -> Iterator[str]:
    yield section.title
    yield from _wrapped(section.meaning, "")
    for each in section.settings:
        default = "unset" if each.default is None else f"= {each.default}"
        yield ""
        yield from _wrapped(f"{each.name}  {default}  ({each.values})", "  ", "      ")
        yield from _wrapped(each.meaning, "      ")


def _wrapped(text: str, indent: str, further: str | None = None) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=further or indent, break_on_hyphens=False
    )


def as_page(found: Sequence[Section]) -> str:
    """The reference page of the documentation."""
    lines = [
        "# Settings",
        "",
        "Everything that a settings file can say. `cubeloom settings` prints this page, `cubeloom settings SECTION` a part",
        "of it, and `--json` the same for programs. On the command line a setting is `--section.name value`, as in",
        "`cubeloom train FILE --rate.peak 3e-4`. `cubeloom init` writes a file to begin with.",
        "",
        "This page is generated: `cubeloom settings --markdown > docs/settings.md`.",
    ]
    for section in found:
        title = f"`{section.title}`" if section.name else "Above all sections"
        lines += ["", f"## {title}", "", section.meaning, "", "| setting | values | default | |", "|---|---|---|---|"]
        lines += map(_row, section.settings)
    return "\n".join(lines)


def _row(each: Setting) -> str:
    values = ", ".join(f"`{choice}`" for choice in each.choices) or each.type
    default = "unset" if each.default is None else f"`{each.default}`"
    return f"| `{each.name}` | {values} | {default} | {each.meaning.replace('|', chr(92) + '|')} |"


def as_options() -> str:
    """For the help of commands that accept them: one line each."""
    lines = ["Settings of FILE, each also an option; `cubeloom settings` says more:"]
    for section in sections(Job):
        for each in section.settings:
            if "[]" not in each.name:
                value = each.default if each.default is not None and each.default != '""' else each.type
                lines.append(
                    textwrap.shorten(f"--{each.name} {value}", 40, placeholder=" …").ljust(34) + f"  {each.meaning}"
                )
    lines += [f"--{short}".ljust(34) + f"  The same as --{name}." for short, name in Job.SHORT.items()]
    return "\n".join(line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…" for line in lines)
