"""A run's model and tokenizer, read from its newest checkpoint, which any grid may have written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cubeloom.base.errors import UserError
from cubeloom.base.settings import load
from cubeloom.models import build, skeleton
from cubeloom.models.decoder import Decoder
from cubeloom.models.external import filled_by
from cubeloom.models.hugging_face_model import FAMILY, from_description
from cubeloom.models.naming import Naming, naming_of_hugging_face
from cubeloom.models.user_model import FAMILY as OF_A_FILE
from cubeloom.models.user_model import UserModel
from cubeloom.parallel import materialise
from cubeloom.tools.convert.checkpoint_files import CheckpointWeights, config_of
from cubeloom.tools.evaluate.found import checkpoint_of
from cubeloom.tools.sample.as_decoder import AsDecoder
from cubeloom.train.checkpoint import check_fits
from cubeloom.train.data import TokenFile, Tokenizer
from cubeloom.train.data.kept_tokenizer import kept
from cubeloom.train.job import Job
from cubeloom.train.run_metadata import from_run, settings_of


@dataclass(frozen=True)
class Trained:
    model: Decoder | AsDecoder
    tokenizer: Tokenizer

    @classmethod
    def of(cls, run: Path, best: bool = False, named: str | None = None) -> Trained:
        """Raises UserError if there is no run, no checkpoint, or if it was not trained on text.

        `named`: the `file.py:function` of the run's model, if it is one: a file that a checkpoint names is not
        executed.
        """
        job = load(Job, settings_of(run))
        if not job.data.sources:
            raise UserError(f"{run} was trained on random tokens: there is no text in it")
        checkpoint = checkpoint_of(run, best)
        weights = CheckpointWeights(checkpoint)
        model = _described(checkpoint, weights, named)
        plain = model.model if isinstance(model, AsDecoder) else model
        check_fits(checkpoint, {name: each.shape for name, each in plain.named_parameters()})
        materialise(plain, filled_by(plain, 0, torch.float32, torch.device("cpu"), weights))
        tokenizer = kept(run) or TokenFile(from_run(run, job.data.sources[0].tokens)).tokenizer
        return cls(model.eval(), tokenizer)


def _described(checkpoint: Path, weights: CheckpointWeights, named: str | None) -> Decoder | AsDecoder:
    """The model that the checkpoint describes, without values."""
    if weights.family == FAMILY:
        model = from_description(weights.progress["model"], f"the checkpoint {checkpoint}")
        config = getattr(model, "config", None)
        naming = naming_of_hugging_face(type(model), bool(getattr(config, "is_encoder_decoder", False)))
        positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        return _writing(checkpoint, model, naming, positions)
    if weights.family == OF_A_FILE:
        return _of_file(checkpoint, weights.progress["model"], named)
    with torch.device("meta"):
        ours = build(config_of(checkpoint, weights.progress))
    if not isinstance(ours, Decoder):
        raise UserError(f"{checkpoint} is of a {weights.family}, which does not write text")
    return ours


def _of_file(checkpoint: Path, said: Mapping[str, Any], named: str | None) -> AsDecoder:
    file, _, function = (named or "").rpartition(":")
    if not file or function != said.get("function"):
        raise UserError(
            f"{checkpoint} is of {said.get('file')}:{said.get('function')}, and nothing is executed that a checkpoint names:"
            f" say it, as --model {said.get('file')}:{said.get('function')}"
        )
    source = UserModel(file, function)
    return _writing(checkpoint, skeleton(source), source.naming, None)


def _writing(checkpoint: Path, model: nn.Module, naming: Naming, positions: int | None) -> AsDecoder:
    if naming.data != "tokens":
        raise UserError(f"{checkpoint} is of a {type(model).__name__}, which does not write text")
    return AsDecoder(model, dict(naming.names)["tokens"], positions)
