"""Finds tensors of whose gradient each rank has a partial sum: those replicated along an axis that cuts a result."""

from __future__ import annotations

from collections.abc import Sequence

from cubeloom.parallel.check.step import Refused
from cubeloom.parallel.check.tracked import Dims, Tracked, described


def summands(name: str, inputs: Sequence[tuple[Tracked, bool]], result: Dims) -> frozenset[str]:
    """The axes along which ranks have partial gradients. `inputs`: each with whether it needs a gradient."""
    needing = [tracked for tracked, needs in inputs if needs]
    cutting = Tracked(result).axes
    unknown = any(factor.ratio > 1 for dim in result for factor in dim)

    def apart(tracked: Tracked) -> list[str]:
        return sorted(cutting - tracked.axes - tracked.summands)

    if used := [each for each in needing if apart(each) or (unknown and not each.summands)]:
        raise Refused(
            f"{name} uses {used[0]}, which is alike on all ranks of {'·'.join(apart(used[0])) or 'an axis'}, for"
            f" {described(result)}, of which each has a part: each rank would have a summand of its gradient. Let a layer"
            " cut it, or name a module that passes it on as CopyToRegion() and use it in layers that are"
            " ColwiseFromReplicated() in the cut",
            used,
        )
    found = frozenset(axis for tracked in needing for axis in tracked.summands) - cutting
    for tracked in needing:
        if missing := sorted(found - tracked.summands - tracked.axes):
            raise Refused(
                f"{name} joins a tensor of whose gradient each rank of {'·'.join(missing)} has a summand, as a CopyToRegion()"
                f" gives it, with {tracked}, of which each has the whole"
            )
    return found
