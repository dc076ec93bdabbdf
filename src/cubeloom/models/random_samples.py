"""Random samples for our models, from seed and step alone: the same on any grid."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from cubeloom.base import counter
from cubeloom.models.configs import BERTConfig, Config, LanguageConfig, ResNetConfig, UNetConfig
from cubeloom.models.layers import CrossEntropy
from cubeloom.parallel import Batch


def random_samples(model: Config, batch: Batch, seed: int, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The global batch of a step, with the names of the model's forward."""
    drawn = _Drawn(seed, step)
    match model:
        case UNetConfig():
            shape = batch.samples, model.in_channels, model.image, model.image
            return {
                "images": (2 * drawn.uniform("images", shape) - 1).to(dtype),
                "noise": (3.4 * (drawn.uniform("noise", shape) - 0.5)).to(dtype),  # of about unit variance
                "times": drawn.below("times", model.steps, (batch.samples,)),
            }
        case ResNetConfig():
            shape = batch.samples, model.channels, model.image, model.image
            return {
                "images": (2 * drawn.uniform("images", shape) - 1).to(dtype),
                "targets": drawn.below("targets", model.classes, (batch.samples,)),
            }
    return _tokens(model, batch, drawn)


class _Drawn:
    def __init__(self, seed: int, step: int) -> None:
        self._seed, self._step = seed, step

    def uniform(self, what: str, shape: tuple[int, ...]) -> Tensor:
        index = torch.arange(prod(shape)).view(shape)
        return counter.uniform(counter.key(self._seed, self._step, what), index)

    def below(self, what: str, high: int, shape: tuple[int, ...]) -> Tensor:
        return (self.uniform(what, shape) * high).long()


def _tokens(model: LanguageConfig, batch: Batch, drawn: _Drawn) -> dict[str, Tensor]:
    """Tokens, and targets of which some are ignored."""
    shape = (batch.samples, batch.sequence)
    data = {"tokens": drawn.below("tokens", model.vocab, shape)}
    # A language model learns all but a few tokens, a masked one only a few.
    learned = drawn.below("learned", 8, shape)
    learned = learned == 0 if isinstance(model, BERTConfig) else learned != 0
    learned[:, 0] = True  # at least one in each sequence
    data["targets"] = drawn.below("targets", model.vocab, shape).masked_fill(~learned, CrossEntropy.ignore_index)
    if isinstance(model, BERTConfig):
        data["types"] = drawn.below("types", model.types, shape)
        if model.next_sentence:
            data["next_sentence"] = drawn.below("next", 2, shape[:1])
    return data
