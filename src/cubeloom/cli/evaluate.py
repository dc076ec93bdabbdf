"""`cubeloom evaluate`: the loss of a trained model on data that it was not trained on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from cubeloom.base.errors import counted
from cubeloom.base.grid import Grid
from cubeloom.base.limits import within
from cubeloom.comm.kinds import Kind

if TYPE_CHECKING:
    from cubeloom.tools.evaluate import Evaluated


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Print the loss and perplexity on validation data, from the newest or the best checkpoint of a run. Changes no file.

    Starts the grid's ranks on this machine, or joins those that torchrun, srun or a Kubernetes job started.
    """

    given: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN|CHECKPOINT")]
    """The folder of a run, or one checkpoint."""
    best: bool = False
    """Use the checkpoint with the lowest validation loss, instead of the newest."""
    model: str | None = None
    """The file.py:function of the run's model, if it is one: a file that a run names is not executed."""
    data: Path | None = None
    """A token folder, by default the run's: its validation part, or all of it if it has none."""
    grid: str | None = None
    """Such as x=2,y=2; by default the run's."""
    batches: int | None = None
    """The number of batches of the run's size; by default all data."""
    sequence: int | None = None
    """Tokens per sample; by default as in training."""
    device: Kind | None = None
    """By default the run's."""
    json: Annotated[bool, tyro.conf.arg(aliases=["-j"])] = False
    """Print one JSON object as the last line."""

    def __call__(self) -> int:
        for name in ("batches", "sequence"):
            if (count := getattr(self, name)) is not None:
                within(f"--{name}", count)
        from cubeloom.tools.evaluate import Evaluation, evaluate

        asked = Evaluation(
            given=self.given,
            best=self.best,
            model=self.model,
            data=self.data,
            grid=None if self.grid is None else Grid.parse(self.grid),
            batches=self.batches,
            sequence=self.sequence,
            device=self.device,
        )
        found = evaluate(asked)
        if found is not None:
            print(
                f"{found.checkpoint}: loss {found.loss:.5f}, perplexity {found.perplexity:.5g} "
                f"({counted(found.targets, 'target')} of {counted(found.samples, 'sample')})"
            )
            if self.json:
                print(json.dumps(as_json(found)))
        return 0


def as_json(found: Evaluated) -> dict[str, object]:
    return {
        "checkpoint": str(found.checkpoint),
        "step": found.step,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "targets": found.targets,
        "samples": found.samples,
        "grid": found.grid.sizes,
    }
