"""A traced model as text: a table of layers, with one line for layers whose names differ only in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from math import prod

from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.cut import pattern_of
from cubeloom.parallel.specs import (
    LayerSpec,
    TracedChannelNormSpec,
    TracedEmbeddingSpec,
    TracedLinearSpec,
    TracedNormSpec,
    WholeSpec,
    parameters,
)
from cubeloom.parallel.volume import Volume, layer_volume

_RESTS = {"both": "{0}·{1}", "one": "{0}", "lazy": "{0}, as logits", "whole": "whole"}


def table(
    model: str,
    specs: Iterable[LayerSpec],
    c: ParallelConfig,
    cut_share: float,
    flops_share: float,
    volume: Volume,
    origins: Mapping[str, str],
) -> Iterator[str]:
    rows: dict[tuple[str, str, str], list[float]] = {}
    why: dict[str, str] = {}
    for spec in specs:
        lies = how(spec)
        if lies is None:
            continue
        numbers = float(sum(prod(each.shape) for each in parameters(spec, c).values()))
        row = rows.setdefault((pattern_of(spec.name), lies, origins.get(spec.name, "traced")), [0, 0, 0])
        moved = sum(layer_volume(spec, c).values(), Fraction())
        row[:] = row[0] + 1, row[1] + numbers, row[2] + float(moved)
        if isinstance(spec, WholeSpec):
            why[pattern_of(spec.name)] = spec.why
    yield f"{model}: {cut_share:.1%} of the parameters are cut over every axis of the cube; a rank computes {flops_share:.1%}"
    width = max((len(name) for name, *_ in rows), default=0)
    for (name, lies, origin), (times, total, received) in rows.items():
        what = f"  {name or '(the model)':<{width}} ×{times:<3.0f} {lies:<34}"
        yield f"{what} {total:>15,.0f} {received:>15,.0f} bytes  {origin}"
    if why:
        yield "whole on every rank of x and y:"
        yield from (f"  {name or '(the model)'}: {reason}" for name, reason in why.items())
    moved_by_axis = ", ".join(f"{axis} {float(size):,.0f}" for axis, size in sorted(volume.items()))
    yield f"a rank receives in a step like the example, in bytes: {moved_by_axis or 'nothing'}"


def how(spec: LayerSpec) -> str | None:
    """The layouts of its input and output features."""
    match spec:
        case TracedLinearSpec():
            before = "whole" if spec.taken == "whole" else _RESTS[spec.taken].format(spec.k_axis, spec.n_axis)
            return f"{before} to {_RESTS[spec.given].format(spec.n_axis, spec.k_axis)}"
        case TracedEmbeddingSpec():
            return f"entries over y, to {_RESTS[spec.given].format('x', 'y')}"
        case TracedNormSpec():
            return f"features over {'·'.join(spec.axes)}"
        case TracedChannelNormSpec():
            return f"channels over {'·'.join(spec.axes)}" if spec.axes else "whole channels"
        case WholeSpec():
            return "whole"
    return None
