"""What the site has besides the pages: README, CONTRIBUTING and CHANGELOG, the examples, and what is generated.

`python docs/hooks.py` writes the generated files: commands.md, from the options that `cubeloom COMMAND --help` shows, and
the drawings. mkdocs calls the functions `on_...`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import cubeloom.pipeline as pipeline
from cubeloom import Grid
from cubeloom.base.settings.describe import meanings
from cubeloom.cli import options
from cubeloom.cli.groups import GROUPS
from cubeloom.parallel.layout import Layout
from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.drawing import to_svg

DOCS = Path(__file__).parent
ROOT = DOCS.parent
_ALSO = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"\[([^]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add what lies outside of the folder of the pages."""
    from mkdocs.structure.files import File

    for name, place in _ALSO.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    for file in sorted((ROOT / "examples").glob("*.*")):
        files.append(File.generated(config, f"examples/{file.name}", abs_src_path=str(file)))
    files.append(File.generated(config, "LICENSE.txt", abs_src_path=str(ROOT / "LICENSE")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Links of the repository lead to the same place on the site. Those with a file's name have the page's title."""
    outside = page.file.src_uri in _ALSO.values()

    def moved(found: re.Match[str]) -> str:
        text, target, heading = found[1], found[2], found[3] or ""
        page_here = (ROOT if outside else DOCS) / target
        if text == target and target.endswith(".md") and page_here.exists():
            text = _title(page_here)
        if outside or target.startswith("../"):
            target = target.removeprefix("docs/").removeprefix("../")
            target = _ALSO.get(target, "LICENSE.txt" if target == "LICENSE" else target)
        return f"[{text}]({target}{heading})"

    return _LINK.sub(moved, markdown)


def _title(page: Path) -> str:
    return page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")


def commands_page() -> str:
    lines = [
        "# Commands",
        "",
        "Every command with its options. `cubeloom COMMAND --help` prints the same. Commands that take a settings file accept",
        "each setting as an option, too: [settings.md](settings.md). Exit codes: 0 if the command succeeded, 1 if what it",
        "checked does not hold or a training failed, 2 if its input is invalid, 75 if a signal stopped a training, 130 after",
        "Ctrl-C.",
        "",
        "This page is generated: `python docs/hooks.py`.",
    ]
    for group, commands in GROUPS.items():
        lines += ["", f"## {group}"]
        for name, about in commands.items():
            kind = getattr(import_module(f"cubeloom.cli.{name}"), name.capitalize())
            lines += ["", f"### `cubeloom {name}`", "", about]
            for words, command in _subcommands(name, kind):
                lines += [*_described(words if words != name else "", command)]
    return "\n".join(lines) + "\n"


def _subcommands(name: str, kind: Any) -> Iterator[tuple[str, type]]:
    if isinstance(kind, type):
        yield name, kind
    elif get_origin(kind) is Annotated:
        base, *said = get_args(kind)
        yield from _subcommands(f"{name} {next(each.name for each in said if getattr(each, 'name', None))}", base)
    else:
        for each in get_args(kind):
            yield from _subcommands(name, each)


def _described(title: str, command: type) -> Iterator[str]:
    if title:
        yield from ("", f"#### `cubeloom {title}`")
    yield from ("", inspect.cleandoc(command.__doc__ or ""), "", "| option | default | |", "|---|---|---|")
    told = {
        name: text
        for each in reversed(command.__mro__)
        if dataclasses.is_dataclass(each)
        for name, text in meanings(each).items()
    }
    hints = get_type_hints(command, include_extras=True)
    for field in dataclasses.fields(command):
        if field.name != "overrides":
            yield _option(field, hints[field.name], told.get(field.name, ""))


def _option(field: dataclasses.Field[Any], hint: Any, meaning: str) -> str:
    word = options.word(hint)
    short = [
        each
        for said in getattr(hint, "__metadata__", ())
        for each in getattr(said, "aliases", None) or ()
        if len(each) == 2
    ]
    positional = "Positional" in str(hint) or any(
        "POSITIONAL" in str(said).upper() for said in getattr(hint, "__metadata__", ())
    )
    shown = field.name.upper() if positional else ", ".join([f"--{field.name.replace('_', '-')}", *short])
    if word and not positional:
        shown += f" {word}"
    default = (
        "required" if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING else ""
    )
    if field.default not in (None, False, dataclasses.MISSING):
        default = f"`{field.default}`"
    return f"| `{shown.replace('|', chr(92) + '|')}` | {default} | {' '.join(meaning.split()).replace('|', chr(92) + '|')} |"


def drawings() -> dict[str, str]:
    """By file name."""
    timelines = [_timeline(name) for name in ("1f1b", "chimera", "chimera-zb")]
    layouts = _layouts(Grid(x=2, y=2, z=2))
    return {"schedules.svg": to_svg(timelines), "layouts.svg": layouts, "overview.svg": _overview(layouts)}


def _overview(layouts: str) -> str:
    """The README's picture: a layer on eight ranks, and below it a pipeline of four workers."""
    width, height = 1220, 706
    titles = (
        (24, "Tensor parallelism: the matrices of a linear layer Y = X · W on eight ranks, x=2, y=2, z=2"),
        (
            406,
            "Pipeline parallelism: four workers under Chimera, which sends micro-batches through them in both directions",
        ),
    )
    words = "".join(
        f'<text x="44" y="{y}" style="font-size: 16px; font-weight: 600">{text}</text>' for y, text in titles
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>'
        f"{_placed(layouts, 100, 40)}{_placed(to_svg([_timeline('chimera')]), 0, 416)}{words}</svg>\n"
    )


def _placed(picture: str, x: int, y: int) -> str:
    return picture.strip().replace("<svg ", f'<svg x="{x}" y="{y}" ', 1)


def _timeline(name: str) -> pipeline.Timeline:
    workers = 4
    costs = Costs.uniform(workers, 1, 1, 1, 0)
    return pipeline.simulate(pipeline.check(pipeline.generate(name, workers, 4, costs=costs)), costs)


# The operands of Y[M,N] = X[M,K] · W[K,N]; Y is a partial sum along x until that is reduced.
_OPERANDS = {
    "X [M, K]": Layout.of(M="z", K="x"),
    "W [K, N]": Layout.of(K="x", N="y"),
    "Y [M, N]": Layout.of(partial="x", M="z", N="y"),
}
_SIDE, _MARGIN = 120, 46
_COLOURS = ("#dbe9f6", "#fbe5c8", "#dff0dc", "#f3dcea")


def _layouts(grid: Grid) -> str:
    panels = []
    for place, (title, layout) in enumerate(_OPERANDS.items()):
        panels.append(
            f'<g transform="translate({_MARGIN + place * (2 * _SIDE + 2 * _MARGIN)} 44)">{_operand(title, layout, grid)}</g>'
        )
    width = len(panels) * (2 * _SIDE + 2 * _MARGIN)
    style = 'font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1c2733; text-anchor: middle'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {2 * _SIDE + 100}" width="{width}" '
        f'height="{2 * _SIDE + 100}">'
        f"<style>.operands text {{ {style} }}</style>"
        f'<rect width="100%" height="100%" fill="#ffffff"/><g class="operands">{"".join(panels)}</g></svg>\n'
    )


def _operand(title: str, layout: Layout, grid: Grid) -> str:
    """The blocks of a matrix, each with the ranks that hold it."""
    (rows, [down]), (columns, [along]) = layout.dims
    missing = next(axis for axis in ("x", "y", "z") if axis not in (down, along))
    note = f"a partial sum over {missing}" if missing in layout.partial else f"no index on {missing}"
    parts = [
        f'<text x="{_SIDE}" y="-26" font-weight="600">{escape(title)}</text>',
        f'<text x="{_SIDE}" y="-8">{columns} on {along} →</text>',
        f'<text transform="translate(-10 {_SIDE}) rotate(-90)">← {rows} on {down}</text>',
        f'<text x="{_SIDE}" y="{2 * _SIDE + 22}">{note}</text>',
    ]
    for row in range(grid.size(down)):
        for column in range(grid.size(along)):
            held = [each for each in range(grid.world) if _at(grid, each, {down: row, along: column})]
            x, y = column * _SIDE, row * _SIDE
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_SIDE}" height="{_SIDE}" fill="{_COLOURS[2 * row + column]}" stroke="#5c6b7a"/>'
                f'<text x="{x + _SIDE // 2}" y="{y + _SIDE // 2 + 4}">ranks {", ".join(map(str, held))}</text>'
            )
    return "".join(parts)


def _at(grid: Grid, rank: int, place: dict[str, int]) -> bool:
    found = grid.coordinates(rank)
    return all(found[axis] == index for axis, index in place.items())


def generated() -> dict[Path, str]:
    pictures = {DOCS / "images" / name: text for name, text in drawings().items()}
    return {DOCS / "commands.md": commands_page(), **pictures}


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
