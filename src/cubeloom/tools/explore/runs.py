"""The view Runs: the runs in a folder, while they train and afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.tools.explore.query import Query

_POINTS = 10_000  # of a curve
_DEEP = 3  # folders below the given one that are searched
_COMPARED = 6


class Runs:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    # What reads runs imports torch, which takes seconds: the page is served before.

    def listed(self) -> dict[str, Any]:
        """Every run by its name, the path below the folder; the one that was written last first."""
        found = {self._name(path): path for path in self._found()}
        last = {name: _changed(path) for name, path in found.items()}
        names = sorted(found, key=lambda name: -last[name])
        return {"folder": str(self._folder), "runs": [{"name": name, "changed": last[name]} for name in names]}

    def drawn(self, asked: Query) -> dict[str, Any]:
        """The runs `names`, separated by commas. `seen` is the state that the page has: it is not sent again."""
        known = {self._name(path): path for path in self._found()}
        names = [name for name in asked.get("names", "").split(",") if name][:_COMPARED]
        for name in names:
            if name not in known:
                raise UserError(f"{self._folder} has no run {name!r}; it has {', '.join(known) or 'none'}")
        state = ",".join(f"{name}:{_changed(known[name])}" for name in names)
        if state and asked.get("seen") == state:
            return {"seen": state, "runs": None}
        from cubeloom.train.metrics.run import read_run
        from cubeloom.train.metrics.view import view

        runs = [view(read_run(known[name]), _POINTS) | {"name": name} for name in names]
        return {"seen": state, "runs": runs}

    def _found(self) -> list[Path]:
        """Folders with the settings of a run; the given folder may be one."""
        from cubeloom.train.run_metadata import SETTINGS

        below = ["/".join(["*"] * depth) for depth in range(1, _DEEP + 1)]
        places = [self._folder, *(path for pattern in below for path in self._folder.glob(pattern))]
        return sorted(path for path in places if (path / SETTINGS).is_file())

    def _name(self, path: Path) -> str:
        return self._folder.resolve().name if path == self._folder else str(path.relative_to(self._folder))


def _changed(path: Path) -> int:
    """When its metrics, or settings, were last written, in milliseconds since 1970."""
    from cubeloom.train.metrics.log import NAME
    from cubeloom.train.run_metadata import SETTINGS

    for name in (NAME, SETTINGS):
        try:
            return (path / name).stat().st_mtime_ns // 1_000_000
        except OSError:
            continue
    return 0
