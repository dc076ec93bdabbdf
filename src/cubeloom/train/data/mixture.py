"""Several streams mixed by weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from cubeloom.base.errors import UserError
from cubeloom.train.data.stream import Stream

LONGEST = 1 << 16


class Mixture:
    """Among any first n samples each stream has its share of n to within one, and yields its samples in its own order.

    Weights are used as written: 0.7 and 0.3 are 7 and 3 in every 10. The order of streams repeats with the sum of the
    weights as integers, so only a table of one such turn is stored.
    """

    def __init__(self, streams: Sequence[Stream], weights: Sequence[float]) -> None:
        if not streams or len(streams) != len(weights):
            raise UserError(f"a mixture has a weight for each stream: got {len(streams)} and {len(weights)} weights")
        if len(sequences := {stream.sequence for stream in streams}) > 1:
            raise UserError(f"streams of sequences {sorted(sequences)} do not mix: choose one length")
        if len({stream.tokenizer for stream in streams}) > 1:
            raise UserError("streams of different tokenizers do not mix: prepare them with one tokenizer file")
        self.streams = tuple(streams)
        self.sequence = streams[0].sequence
        self._parts = torch.tensor(whole_numbers(weights))
        self._stream = torch.tensor(turn(self._parts.tolist()))
        given = torch.nn.functional.one_hot(self._stream, len(streams)).cumsum(0)
        self._before = (
            given.gather(1, self._stream[:, None]).squeeze(1) - 1
        )  # samples of its stream earlier in the turn

    def batch(self, numbers: Tensor) -> dict[str, Tensor]:
        which, own = self.source(numbers)
        out: dict[str, Tensor] = {}
        for index in which.unique().tolist():
            for name, rows in self.streams[index].batch(own[which == index]).items():
                out.setdefault(name, rows.new_empty(len(numbers), *rows.shape[1:]))[which == index] = rows
        return out

    def needed(self, count: int) -> list[int]:
        """How many of the first `count` samples each stream gives."""
        which, own = self.source(torch.arange(count))
        return [
            int(own[which == index].max()) + 1 if (which == index).any() else 0 for index in range(len(self.streams))
        ]

    @property
    def longest(self) -> int:
        """The largest number of samples without a repetition."""
        turns = min(stream.windows / part for stream, part in zip(self.streams, self._parts.tolist(), strict=True))
        count = int((turns + 1) * len(self._stream))
        while any(need > stream.windows for need, stream in zip(self.needed(count), self.streams, strict=True)):
            count -= 1
        return count

    def source(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """The stream of each sample, and its number in that stream."""
        turns, within = numbers // len(self._stream), numbers % len(self._stream)
        which = self._stream[within]
        return which, turns * self._parts[which] + self._before[within]


def whole_numbers(weights: Sequence[float]) -> list[int]:
    """The smallest integers in the same proportion."""
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise UserError(f"weights must be above 0, got {', '.join(map(str, weights))}")
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(part.denominator for part in exact))
    parts = [int(part * scale) for part in exact]
    parts = [part // math.gcd(*parts) for part in parts]
    if sum(parts) > LONGEST:
        raise UserError(
            f"the weights {', '.join(map(str, weights))} are {sum(parts):,} whole parts, and at most {LONGEST:,} will do;"
            " write them with fewer digits"
        )
    return parts


def turn(parts: Sequence[int]) -> list[int]:
    """The stream of each sample of one turn, with `parts[i]` samples of stream i.

    Sample k of stream i has a window, from ⌊k·whole/part⌋ until ⌈(k+1)·whole/part⌉. Of the streams whose window is
    open, the one whose window closes first is next. Each stream thus always has its share to within one (Tijdeman, The
    chairman assignment problem, 1980).
    """
    whole, given, order = sum(parts), [0] * len(parts), []
    for slot in range(whole):
        closing = [
            (-(-(given[i] + 1) * whole // part), i) for i, part in enumerate(parts) if given[i] * whole // part <= slot
        ]
        chosen = min(closing)[1]
        given[chosen] += 1
        order.append(chosen)
    return order
