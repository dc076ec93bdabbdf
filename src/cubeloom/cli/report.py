"""`cubeloom report`: a page of a run's curves, a step of it, its events and settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class Report:
    """Write one self-contained HTML page about a run that ended, crashed or is still running.

    It has the curves, a measured step beside the simulated one, the events and the settings.
    """

    folder: tyro.conf.Positional[Path]
    """The folder of the run."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """The file to write; by default report.html in the folder."""
    json: Annotated[bool, tyro.conf.arg(aliases=["-j"])] = False
    """Print one JSON object as the last line."""

    def __call__(self) -> int:
        from cubeloom.train.metrics import write_report
        from cubeloom.train.metrics.run import read_run

        file = write_report(self.folder, self.output)
        if self.json:
            print(json.dumps({"report": str(file), **read_run(self.folder).as_json()}))
        else:
            print(file)
        return 0
