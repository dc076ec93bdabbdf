"""What the layers of a rank communicate in a step, event by event, from layouts, schedule and settings alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from cubeloom.comm import Ledger
from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.recomputed import layers_of
from cubeloom.parallel.specs import Collective, LayerSpec, collectives, repeated
from cubeloom.pipeline.workload import Workload
from cubeloom.tools.verify import Experiment

Events = Counter[tuple[str, frozenset[str], int]]  # operation, axes, bytes
NOT_OF_LAYERS = ("gradients", "parameters", "loss counts", "loss")
MESSAGES = ("send", "receive")


def counted(ledger: Ledger) -> Events:
    """What a rank's ledger has of its layers."""
    return Counter(
        (each.operation, frozenset(each.axis.split("+")), each.size)
        for each in ledger.entries
        if each.origin not in NOT_OF_LAYERS and each.operation not in MESSAGES
    )


@dataclass(frozen=True)
class Part:
    """The layers of a stage that the rank holds, how often they run, and the blocks that are recomputed."""

    specs: Sequence[LayerSpec]
    passes: int
    gathers: int  # of a weight that is kept
    blocks: Sequence[tuple[Sequence[LayerSpec], Collection[str]]]  # each with the layers whose results are kept


def from_layouts(experiment: Experiment, rank: int) -> Events:
    here = experiment.grid.coordinates(rank)
    whole = ParallelConfig.exact(experiment.grid, experiment.rest, experiment.batch, experiment.dtype.itemsize, here)
    portions = 1 if experiment.schedule is None else Workload.of(experiment.schedule, here["pipe"]).portions
    c = replace(whole, samples=whole.samples / portions / experiment.ways)
    found: Events = Counter()
    for part in _parts(experiment, here["pipe"]):
        for each, alone in _moves(part, c):
            move, times = each
            axes = frozenset(axis for axis in move.axes if c.size(axis) > 1)
            if axes and move.nbytes:
                found[move.operation, axes, int(move.nbytes)] += times * (1 if alone else experiment.ways)
    return +found


def _parts(experiment: Experiment, worker: int) -> Iterator[Part]:
    if experiment.schedule is None:
        specs, model = experiment.specs(), experiment.skeleton()
        yield Part(specs, 1, 1, [(layers_of(block, specs), ()) for block in experiment.blocks(model, specs)])
        return
    layout = experiment.layout(experiment.schedule)
    kept = layout.kept(worker, experiment.recompute, experiment.dtype.itemsize)
    for held in Workload.of(experiment.schedule, worker).held:
        specs = list(layout.specs_of(held.stage))
        blocks = layout.blocks_of(held.stage, experiment.recompute)
        again = [(layers_of(block, specs), kept.get(block, frozenset())) for block in blocks]
        yield Part(specs, held.passes, held.gathers, again)


def _moves(part: Part, c: ParallelConfig) -> Iterator[tuple[tuple[Collective, int], bool]]:
    """Each collective with how often it runs, and whether all strands of a micro-batch have it in common: that of a
    weight, or a sum over the whole batch, whose size does not depend on the samples.
    """
    double = replace(c, samples=2 * c.samples)

    def alone(move: Collective, of_more: Collective) -> bool:
        return move.of_weight or move.nbytes == of_more.nbytes

    for spec in part.specs:
        for move, of_more in zip(collectives(spec, c), collectives(spec, double), strict=True):
            yield (move, part.gathers if move.gathered_to_keep else part.passes), alone(move, of_more)
    for block, kept in part.blocks:
        for (move, times), (of_more, _) in zip(repeated(block, c, kept), repeated(block, double, kept), strict=True):
            yield (move, times * part.passes), alone(move, of_more)
