"""Evaluates the closed form of every decomposition, and keeps the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cubeloom.base.divisors import divisors
from cubeloom.base.limits import FORWARDS
from cubeloom.parallel.config import ParallelConfig
from cubeloom.plan.cost_model.memory import PieceMemory, room
from cubeloom.plan.cost_model.peak import memory
from cubeloom.plan.cost_model.recompute import RECOMPUTE, Recompute
from cubeloom.plan.cost_model.schedules import ScheduleModel, shapes
from cubeloom.plan.cost_model.step import busiest, pipelined, step
from cubeloom.plan.cost_model.timing import Times, times
from cubeloom.plan.cost_model.volume import output_numbers
from cubeloom.plan.cost_model.worker_load import Load, Pieces, WorkerLoad, carry, loads, weighted
from cubeloom.plan.hardware import Cluster, Dtype
from cubeloom.plan.model import Model, refusals, with_stages
from cubeloom.plan.search.best import Best, Candidate, Tally
from cubeloom.plan.search.space import Array, Part, Space, Task, at, flat, found_distinct, space

NO_CUT = "x and y on which the model has no cut"
NEEDLESS = "recomputation where it fits without: never faster"


def find(
    model: Model, cluster: Cluster, task: Task, dtype: Dtype, keep: int, only: Part | None = None
) -> tuple[list[Candidate], Tally]:
    """The best by the closed form, the best first; of all decompositions, or of a part."""
    whole = space(task, cluster.devices_per_node, only)
    tally, best = Tally(), Best(keep)
    on = [_planes(variant, whole) for variant in model.variants]
    tally.refused[NO_CUT] += int(np.sum(~np.any(on, axis=0)))
    for variant, cubes in zip(model.variants, on, strict=True):
        if cubes.any():
            _of_variant(variant, cluster, task, dtype, only, whole, cubes, best, tally)
    return best.found, tally


def _planes(variant: Model, whole: Space) -> Array:
    """The cubes for which this is the model."""
    if variant.planes is None:
        return np.ones(len(whole.cubes), dtype=bool)
    return np.array([(int(x), int(y)) in variant.planes for _, y, x in whole.cubes])


def _of_variant(
    model: Model,
    cluster: Cluster,
    task: Task,
    dtype: Dtype,
    only: Part | None,
    whole: Space,
    cubes: Array,
    best: Best,
    tally: Tally,
) -> None:
    legal, reasons = _legal(model, whole)
    chosen = whole.distinct if model.planes is None else found_distinct(whole.settings)
    shape = np.broadcast_shapes(legal.shape, chosen.shape)
    here = cubes.reshape(-1, 1, 1, 1, 1, 1)
    legal = np.broadcast_to(legal & here, shape)
    mesh = _Mesh(whole, shape, np.broadcast_to(chosen & here, shape), legal, reasons)
    costs = _Costs.of(model, whole, np.asarray(legal.any(axis=(1, 2, 3, 4, 5))), cluster, dtype)
    for workers in only.pipes if only else divisors(task.devices):
        kinds = [shape for shape in shapes(workers) if not (only and only.schedules) or shape.name in only.schedules]
        _with_pipe(model, cluster, task, workers, kinds, mesh, costs, best, tally)


@dataclass(frozen=True)
class _Mesh:
    space: Space
    shape: tuple[int, ...]
    distinct: Array
    legal: Array
    reasons: list[tuple[str, Array]]


@dataclass(frozen=True)
class _Costs:
    """Of the cubes that some decomposition can have: times of each, and memory, which does not depend on their orders, once."""

    times: list[Times]
    held: Pieces
    place: Array  # of each cube in the times
    own: Array  # and in what is held

    @classmethod
    def of(cls, model: Model, whole: Space, some: Array, cluster: Cluster, dtype: Dtype) -> _Costs:
        _, first, alike = np.unique(whole.cubes, axis=0, return_index=True, return_inverse=True)
        few = np.zeros(len(some), bool)
        few[first] = True
        few &= some
        s = _some_cubes(whole.settings, some)
        own = (np.cumsum(few) - 1)[first][alike.reshape(-1)]
        held = _held(model, _some_cubes(whole.settings, few))
        return cls([times(kind, s, cluster, dtype) for kind in model.kinds], held, np.cumsum(some) - 1, own)


def _legal(model: Model, whole: Space) -> tuple[Array, list[tuple[str, Array]]]:
    """Where all sizes divide; and for each reason where it is the first that applies."""
    s = replace(whole.settings, samples=whole.settings.samples / whole.settings.ways)
    fine: Any = np.asarray(s.samples % 1 == 0)
    masks: dict[str, Any] = {}
    for what, bad in refusals(model, s):
        masks[what] = masks.get(what, False) | bad
    firsts = [("strands of a micro-batch", ~fine)]
    for what, bad in masks.items():
        firsts.append((what, fine & bad))
        fine = fine & ~bad
    return np.asarray(fine), firsts


def _some_cubes(s: ParallelConfig, which: Array) -> ParallelConfig:
    """The mesh with only some of its cubes: refused cubes get no costs."""

    def at(values: Any) -> Any:
        many = isinstance(values, np.ndarray) and values.ndim == 6 and values.shape[0] == len(which)
        return values[which] if many else values

    names = ("z", "y", "x", "samples", "sharded", "weights", "regathered", "ways")
    rank_stride = {axis: at(values) for axis, values in s.rank_stride.items()}
    return replace(s, rank_stride=rank_stride, **{name: at(getattr(s, name)) for name in names})


def cost(model: Model, s: ParallelConfig, cluster: Cluster, dtype: Dtype) -> Pieces:
    return replace(_held(model, s), times=[times(kind, s, cluster, dtype) for kind in model.kinds])


def _held(model: Model, s: ParallelConfig) -> Pieces:
    """Without their times."""
    kinds = model.kinds
    handed = output_numbers(kinds[model.row[len(model.row) // 2]].outputs, model, s) * s.item
    owners = [
        place for place, kind in enumerate(kinds) for layer in kind.layers if f"{layer.name}.weight" in model.tied
    ]
    return Pieces(
        s,
        [],
        [room(kind, s) for kind in kinds],
        handed,
        owners[0] if owners else None,
        tuple(kind.block for kind in kinds),
    )


def taken(pieces: Pieces, index: tuple[Array, ...], shape: tuple[int, ...], s: ParallelConfig) -> Pieces:
    at = _taker(index, shape)
    return Pieces(
        s,
        [Times(*map(at, each)) for each in pieces.times],
        [PieceMemory(*map(at, each)) for each in pieces.rooms],
        at(pieces.handed),
        pieces.owner,
        pieces.blocks,
    )


def _taker(index: tuple[Array, ...], shape: tuple[int, ...]) -> Callable[[Any], Array]:
    """Takes these places of a mesh out of arrays, one after the other."""
    places: dict[tuple[int, ...], Array] = {}

    def at(values: Any) -> Array:
        values = np.asarray(values)
        own = values.shape
        if own not in places:
            wide = (1,) * (len(shape) - len(own)) + own
            spots = [each if size > 1 else np.zeros_like(each) for each, size in zip(index, wide, strict=True)]
            places[own] = np.ravel_multi_index(spots, wide)
        return values.reshape(-1).take(places[own])

    return at


def _with_pipe(
    model: Model,
    cluster: Cluster,
    task: Task,
    workers: int,
    kinds: Sequence[ScheduleModel],
    mesh: _Mesh,
    costs: _Costs,
    best: Best,
    tally: Tally,
) -> None:
    """All decompositions with this number of pipeline workers."""
    cubes = mesh.space.cubes.prod(axis=1)
    data = task.devices / (cubes * workers)
    fits = data % 1 == 0
    count = task.samples / (data[:, None] * mesh.space.cubes[:, :1] * mesh.space.sizes[None, :])  # [cubes, sizes]
    whole = fits[:, None] & (count % 1 == 0)
    asked = mesh.distinct & whole[:, :, None, None, None, None]
    variants = len(RECOMPUTE) * len(kinds)
    tally.considered += int(asked.sum()) * variants
    for what, first in mesh.reasons:
        tally.refused[what] += int((asked & first).sum()) * variants
    possible = asked & mesh.legal
    if not possible.any():
        return
    if workers > len(model.row):
        tally.refused["more stages than pieces"] += int(possible.sum()) * variants
        return
    # However stages are assigned, one worker keeps at least the mean of what all keep of a micro-batch.
    least = _kept(model, costs.held)[costs.own] / workers
    too_large = possible & (least > task.room(cluster))
    tally.refused["memory"] += int(too_large.sum()) * variants
    index = np.nonzero(possible & ~too_large)
    if not len(index[0]):
        return
    batch = _batch(task, cluster, workers, data, count, index, mesh, costs)
    for shape in kinds:
        if workers * shape.chunks > len(model.row):
            tally.refused["more stages than pieces"] += len(index[0]) * len(RECOMPUTE)
            continue
        chosen = with_stages(model, workers * shape.chunks)
        _with_schedule(chosen, shape, batch, best, tally)


def _batch(
    task: Task,
    cluster: Cluster,
    workers: int,
    data: Array,
    count: Array,
    index: tuple[Array, ...],
    mesh: _Mesh,
    costs: _Costs,
) -> _Batch:
    """Decompositions at these places of the mesh; what they hold, once for all that differ in their order only."""
    own = data[index[0]]
    s = flat(mesh.space.settings, index, mesh.shape, data=own)
    s = replace(s, samples=s.samples * own, rank_stride=_inner(mesh.space, index))
    shape = (int(costs.own.max()) + 1, *mesh.shape[1:])
    _, first, alike = np.unique(
        np.ravel_multi_index((costs.own[index[0]], *index[1:]), shape), return_index=True, return_inverse=True
    )
    few = tuple(each[first] for each in index)
    held = taken(costs.held, (costs.own[few[0]], *few[1:]), shape, at(s, first))
    # The mesh does not include data, over which every weight has replicas.
    split = ("states", "shared_states", "pair")
    rooms = [room._replace(**{name: getattr(room, name) / own[first] for name in split}) for room in held.rooms]
    take = _taker((costs.place[index[0]], *index[1:]), (int(costs.place.max()) + 1, *mesh.shape[1:]))
    pieces = replace(held, times=[Times(*map(take, each)) for each in costs.times], rooms=rooms)
    return _Batch(task.room(cluster), cluster, workers, count[index[:2]], s, pieces, first, alike.reshape(-1))


def _kept(model: Model, pieces: Pieces) -> Array:
    """A lower bound on what all stages together keep of one micro-batch, over the mesh."""
    row = tuple(float(model.row.count(kind)) for kind in range(len(model.kinds)))
    return np.asarray(weighted(row, [room.given for room in pieces.rooms]))


class _Batch:
    """Decompositions with the same number of workers; what several schedules share is computed once.

    The memory of `pieces` is of those at `first`; all are like one of them, at `alike`.
    """

    def __init__(
        self, room: float, cluster: Cluster, workers: int, count: Array, s: ParallelConfig, pieces: Pieces,
        first: Array, alike: Array,
    ) -> None:  # fmt: skip
        self.room = room  # bytes available for tensors
        self.cluster, self.workers, self.count, self.settings, self.pieces = cluster, workers, count, s, pieces
        self.few, self.alike = count[first], alike
        self._carried: dict[tuple[Load, ...], tuple[WorkerLoad, ...]] = {}

    def carried(self, held: tuple[Load, ...]) -> tuple[WorkerLoad, ...]:
        alike = tuple(replace(load, first=0) for load in held)
        if alike not in self._carried:
            self._carried[alike] = carry(held, self.pieces)
        return self._carried[alike]


def _inner(whole: Space, index: tuple[Array, ...]) -> dict[str, Array]:
    """The smallest distance of neighbours along each axis, as data and pipe may be inside the cube or outside of it."""
    near = np.ones(len(index[0]))
    return {**dict(zip(("z", "y", "x"), whole.rank_stride[index[0]].T, strict=True)), "data": near, "pipe": near}


def _with_schedule(model: Model, shape: ScheduleModel, batch: _Batch, best: Best, tally: Tally) -> None:
    s, count, workers = batch.settings, batch.count, batch.workers
    allowed = np.broadcast_to(shape.legal(workers, count), count.shape)
    if shape.halves:
        allowed = allowed & (s.samples_of % (2 * s.ways) == 0)
    if model.has_batch_norm:
        allowed = allowed & (count == 1)
    tally.refused[f"schedule: {shape.rule or shape.name}"] += int((~allowed).sum()) * len(RECOMPUTE)
    long = allowed & (workers * shape.chunks * count > FORWARDS)
    tally.refused[f"schedule: more than {FORWARDS:,} forwards"] += int(long.sum()) * len(RECOMPUTE)
    allowed = allowed & ~long
    if not allowed.any():
        return
    held = loads(model, shape, workers)
    carried = batch.carried(held)
    left = allowed  # those that do not fit with less recomputation: it shortens no action, and so no step
    room = _room(shape, batch, held, carried, batch.few, False)[batch.alike]
    for recompute in RECOMPUTE:
        tally.refused[NEEDLESS] += int((allowed & ~left).sum())
        if recompute == "attention":
            fits = left & (room - _inside(shape, batch, held, carried) <= batch.room)
            index = np.nonzero(fits)[0]  # few, because fused attention keeps little
            own = [c.take(index, batch.alike[index]) for c in carried]
            some = _room(shape, batch, held, own, count[index], recompute)
            fits[index] = some <= batch.room
        else:
            most = room
            if recompute and left.any():
                most = _room(shape, batch, held, carried, batch.few, recompute)[batch.alike]
            fits = left & (most <= batch.room)
        left = left & ~fits
        tally.refused["memory"] += int(left.sum())
        if not fits.any():
            continue
        # A lower bound without messages and gradient reductions: only candidates among the best get these timed.
        least = pipelined(shape, workers, count, *busiest(shape, carried, recompute)[:3])
        index = np.nonzero(fits & (least < best.bar))[0]
        if len(index):
            chosen, own = at(s, index), [c.take(index, batch.alike[index]) for c in carried]
            timed = step(shape, workers, count[index], own, chosen, batch.cluster, recompute)
            best.offer(timed.seconds, chosen, count[index], shape, workers, recompute)


def _room(
    shape: ScheduleModel,
    batch: _Batch,
    held: Sequence[Load],
    carried: Sequence[WorkerLoad],
    count: Array,
    recompute: Recompute,
) -> Array:
    """Bytes of the worker that needs most."""
    item = batch.settings.item
    return _most(
        memory(shape, batch.workers, load.first, count, c, item, recompute, batch.cluster.software).total
        for load, c in zip(held, carried, strict=True)
    )


def _inside(shape: ScheduleModel, batch: _Batch, held: Sequence[Load], carried: Sequence[WorkerLoad]) -> Array:
    """The most bytes that recomputed attention can save."""
    found = _most(
        shape.in_flight(batch.workers, batch.few, load.first) * c.inside for load, c in zip(held, carried, strict=True)
    )
    return np.asarray(np.broadcast_to(found, batch.few.shape)[batch.alike])


def _most(values: Iterator[Any]) -> Array:
    found = next(values)
    for value in values:
        found = np.maximum(found, value)
    return np.asarray(found)
