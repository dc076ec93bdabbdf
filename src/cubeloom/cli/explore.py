"""`cubeloom explore`: plans, schedules, layouts and runs on one local page."""

from __future__ import annotations

import webbrowser
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import tyro

from cubeloom.base.errors import UserError
from cubeloom.base.limits import within


@dataclass(frozen=True, kw_only=True)
class Explore:
    """Serve one page with plans, schedules, layouts and runs to a browser on this machine.

    The address has a random token: whoever has it can read what the page shows; other machines cannot connect.
    """

    folder: tyro.conf.Positional[Path] = Path("runs")
    """The folder with runs."""
    port: int = 0
    """The port on 127.0.0.1; by default any that is free."""
    open: bool = False
    """Open the page in the browser."""

    def __call__(self) -> int:
        within("--port", self.port, least=0, most=65535)
        missing = [package for package in ("starlette", "uvicorn") if find_spec(package) is None]
        if missing:
            raise UserError(f"cubeloom explore needs {' and '.join(missing)}: pip install 'cubeloom[explore]'")
        from cubeloom.tools.explore.serve import serve

        serve(self.folder, self.port, self._told)
        return 0

    def _told(self, address: str) -> None:
        print(f"{address}\nCtrl-C ends it. Runs are those in {self.folder}.", flush=True)
        if self.open:
            webbrowser.open_new_tab(address)
