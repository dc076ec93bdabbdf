"""A run's model and tokenizer, read back from its newest checkpoint: any grid's will do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from cubeloom.base.errors import UserError
from cubeloom.base.settings import load
from cubeloom.models import build
from cubeloom.models.decoder import Decoder
from cubeloom.parallel import materialise
from cubeloom.parallel.parameter import Block
from cubeloom.tools.convert.checkpoint_files import CheckpointWeights, config_of
from cubeloom.tools.evaluate.found import checkpoint_of
from cubeloom.train.checkpoint import check_fits
from cubeloom.train.data import TokenFile, Tokenizer
from cubeloom.train.data.kept_tokenizer import kept
from cubeloom.train.job import Job
from cubeloom.train.run_metadata import from_run


@dataclass(frozen=True)
class Trained:
    model: Decoder
    tokenizer: Tokenizer

    @classmethod
    def of(cls, run: Path, best: bool = False) -> Trained:
        """Raises UserError where there is no run, no checkpoint, or no text that it was trained on."""
        job = load(Job, run / "settings.toml")
        if not job.data.sources:
            raise UserError(f"{run} was trained on random tokens: there is no text in it")
        checkpoint = checkpoint_of(run, best)
        weights = CheckpointWeights(checkpoint)
        with torch.device("meta"):
            model = build(config_of(checkpoint, weights.progress))
        if not isinstance(model, Decoder):
            raise UserError(f"{checkpoint} is of a {weights.progress['model']['family']}, which does not write text")
        check_fits(checkpoint, {name: each.shape for name, each in model.named_parameters()})

        def fill(name: str, _: Block) -> torch.Tensor:
            return weights.read(name).float()

        materialise(model, fill)
        tokenizer = kept(run) or TokenFile(from_run(run, job.data.sources[0].tokens)).tokenizer
        return cls(model.eval(), tokenizer)
