"""A text gone on with, token by token."""

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
    """So many tokens more. The same seed gives the same; a temperature of 0 always takes the likeliest.

    A model may have more tokens than the `vocabulary` of its tokenizer, so that their number divides: those are not drawn.
    What it can see is its number of positions: a longer text is forgotten from its begin.
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
