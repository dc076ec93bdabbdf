"""Continues a text token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cubeloom.base import counter
from cubeloom.models.decoder import Decoder
from cubeloom.tools.sample.as_decoder import AsDecoder


@torch.no_grad()
def continue_(
    model: Decoder | AsDecoder, vocabulary: int, tokens: list[int], count: int, temperature: float, seed: int
) -> Iterator[int]:
    """`count` more tokens. The same seed gives the same text; a temperature of 0 always takes the most likely token.

    A model may have more tokens than the `vocabulary` of its tokenizer, as padding: these are not drawn. The model sees
    as many tokens as it has positions; of a longer text the beginning is dropped.
    """
    tokens = list(tokens)
    for place in range(count):
        seen = torch.tensor([tokens[-model.positions_most :]])
        logits = model(seen)[-1, :vocabulary].double()  # of the last token
        tokens.append(_draw(logits, temperature, counter.uniform(counter.key(seed, "sample"), torch.tensor([place]))))
        yield tokens[-1]


def _draw(logits: Tensor, temperature: float, chance: Tensor) -> int:
    if temperature == 0:
        return int(logits.argmax())
    shares = torch.softmax(logits / temperature, 0).cumsum(0)
    return min(int(torch.searchsorted(shares, chance.double())), len(shares) - 1)
