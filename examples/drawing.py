"""What the demo shows: a progress bar, tables, and two curves made of characters. Nothing here is about the library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


@contextmanager
def progress(label: str, steps: int, shown: bool) -> Iterator[Callable[[float], None]]:
    """A bar that moves on by one step with each loss it is told."""
    columns = (TextColumn(f"{label:>17}"), BarColumn(32), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TextColumn("{task.fields[loss]}"), TimeElapsedColumn(), disable=not shown) as bar:
        task = bar.add_task("", total=steps, loss="")
        yield lambda loss: bar.update(task, advance=1, loss=f"loss {loss:.4f}")


def table(title: str, header: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    made = Table(title=title, title_justify="left", title_style="bold")
    for column, name in enumerate(header):
        made.add_column(name, justify="left" if column == 0 else "right")
    for row in rows:
        made.add_row(*row)
    return made


def plot(serial: list[float], grid: list[float], height: int = 10, width: int = 64) -> str:
    """Both curves over the steps: s and g, and ● where they fall together."""
    low, high = min(*serial, *grid), max(*serial, *grid)
    canvas = [[" "] * width for _ in range(height)]
    for mark, losses in (("s", serial), ("g", grid)):
        for column in range(width):
            loss = losses[column * (len(losses) - 1) // (width - 1)]
            row = round((high - loss) / (high - low or 1.0) * (height - 1))
            canvas[row][column] = mark if canvas[row][column] == " " else "●"
    labels = [f"{high:.2f}", *[""] * (height - 2), f"{low:.2f}"]
    lines = [f"{label:>6} │{''.join(row).rstrip()}" for label, row in zip(labels, canvas, strict=True)]
    axis = f"{'└':>8}" + "─" * width
    return "\n".join([*lines, axis, f"{'step 0':>13}{len(serial) - 1:>{width - 5}}"])
