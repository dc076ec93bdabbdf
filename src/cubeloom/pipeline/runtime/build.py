"""Builds the stages of one worker: the model pruned to each stage, with its layers sharded over the cube."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from torch import nn

from cubeloom.base.divisors import nearest_multiples
from cubeloom.base.errors import UserError, counted
from cubeloom.base.grid import Grid
from cubeloom.base.limits import within
from cubeloom.comm import Network
from cubeloom.models import AttentionCore
from cubeloom.models.pieces import Piece
from cubeloom.parallel import AnyCut, Batch, CubeState, ShardingPolicy, resolve
from cubeloom.parallel.check import Example
from cubeloom.parallel.compiled import compile_local, whole_blocks
from cubeloom.parallel.config import ParallelConfig
from cubeloom.parallel.fp8 import AmaxHistory, amax_history
from cubeloom.parallel.gradients import Gradients
from cubeloom.parallel.layout import Axes
from cubeloom.parallel.recomputed import blocks_of, layers_of, recompute_blocks
from cubeloom.parallel.replace import Fill, replace_layers
from cubeloom.parallel.specs import (
    Budget,
    ImageNormSpec,
    LayerSpec,
    LossSpec,
    SquaredLossSpec,
    TracedChannelNormSpec,
    TracedLinearSpec,
    TracedLossSpec,
    WholeSpec,
    collectives,
    kept_results,
    parameters,
    shared_copies,
)
from cubeloom.parallel.state import Clock
from cubeloom.parallel.traced import Row
from cubeloom.parallel.volume import Volume, named
from cubeloom.parallel.weave import recompute as recomputed
from cubeloom.pipeline import Schedule, Updates, check
from cubeloom.pipeline.memory import in_flight
from cubeloom.pipeline.runtime.microbatches import portions
from cubeloom.pipeline.runtime.model_pieces import ModelPieces, Outputs
from cubeloom.pipeline.runtime.partition import belongs, counted_costs, partition
from cubeloom.pipeline.runtime.recorded import Record, RecordedStage
from cubeloom.pipeline.runtime.row_stage import RowStage, leave_out
from cubeloom.pipeline.runtime.stage import Run, Stage
from cubeloom.pipeline.volume import RankOutput, StageOutput, pipeline_volume
from cubeloom.pipeline.workload import Workload

Home = tuple[int, int]  # replica, stage
# Completes a stage after its layers have been replaced.
Finish = Callable[[nn.Module, CubeState, Fill], None]
Recompute = bool | Collection[int] | Literal["attention"] | Budget


class MissingStage(nn.Module):
    """Replaces a module that belongs to another stage."""


@dataclass(frozen=True)
class StagePlan:
    """The modules and layers of each stage, and the workers that hold it."""

    schedule: Schedule
    stages: Sequence[range]  # the pieces of each stage
    modules: Sequence[tuple[str, ...]]  # the modules of each piece
    specs: Sequence[LayerSpec]
    outputs: Outputs  # the tensors that each piece sends to the next
    tokens: bool  # rows are tokens
    blocks: tuple[str, ...] = ()  # the modules that recomputation runs once more
    row: Row | None = None  # of a model that does not list its pieces
    aliases: Mapping[str, str] = field(default_factory=dict)  # from a parameter's name in the model to its layer's
    config: ParallelConfig | None = None  # of one portion, with numbers of one byte
    # A cache: read in every step, and slow to compute if a model has many layers.
    _holders: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False)

    def modules_of(self, stage: int) -> tuple[str, ...]:
        return tuple(name for piece in self.stages[stage] for name in self.modules[piece])

    def specs_of(self, stage: int) -> list[LayerSpec]:
        modules = self.modules_of(stage)
        return _gathering([spec for spec in self.specs if belongs(spec.name, modules)])

    def output_of(self, stage: int) -> tuple[StageOutput | RankOutput, ...]:
        """The tensors that a stage sends to the next."""
        return self.outputs[self.stages[stage][-1]]

    def used_shapes(self, grid: Grid) -> dict[str, tuple[int, ...]]:
        """The shapes of parameters that code outside of layers uses, as one rank uses them."""
        whole = [spec for spec in self.specs if isinstance(spec, WholeSpec)]
        return {f"{spec.name}.{each.name}": each.part(grid.sizes) for spec in whole for each in spec.own}

    def check_options(self, recompute: Recompute) -> None:
        """Raises UserError for options that a model which does not list its pieces cannot have."""
        if recompute == "attention" and self.row is not None:
            raise UserError("this model does not say its pieces, so that attention alone cannot be recomputed")

    def blocks_of(self, stage: int, recompute: Recompute) -> list[str]:
        """The modules of a stage that are computed once more in its backward."""
        if isinstance(recompute, Budget):
            recompute = True
        whole = recompute if isinstance(recompute, bool) else recompute != "attention" and stage in recompute
        modules = self.modules_of(stage)
        return [name for name in self.blocks if whole and belongs(name, modules)]

    def kept(self, worker: int, recompute: Recompute, item: int) -> dict[str, frozenset[str]]:
        """Of each block that a worker recomputes, the layers whose results it keeps; with `item` bytes a number."""
        if not isinstance(recompute, Budget) or self.config is None:
            return {}
        flying: dict[str, float] = {}
        for replica, stage in self.schedule.held_by(worker):
            row = (each for each in self.schedule.workers[worker] if (each.replica, each.stage) == (replica, stage))
            most = in_flight(tuple(row)) * (2 if self.schedule.halved else 1)
            for block in self.blocks_of(stage, recompute):
                flying[block] = flying.get(block, 0.0) + most
        blocks = {block: layers_of(block, self.specs) for block in flying}
        return kept_results(blocks, flying, replace(self.config, item=item), recompute)

    def volume(self, c: ParallelConfig, worker: int, zero: bool = False, recompute: Recompute = False) -> Volume:
        """Bytes that a rank of a worker receives in a step of `c.samples` samples, by axis."""
        count = len(self.stages)
        stages = [[(spec, 1) for spec in self.specs_of(stage)] for stage in range(count)]
        part = replace(c, samples=c.samples / Workload.of(self.schedule, worker).portions)
        received = [
            c.item * sum(output.elements(self.tokens, part) for output in self.output_of(stage))
            for stage in range(count)
        ]
        tied = {f"{owner}.weight" for spec in self.specs if (owner := shared_owner(spec))}
        losses = sum(isinstance(spec, LossSpec | SquaredLossSpec | TracedLossSpec) for spec, _ in stages[-1])
        kept, nothing = self.kept(worker, recompute, int(c.item)), frozenset[str]()
        again = [
            [
                (layers_of(block, self.specs_of(stage)), 1, kept.get(block, nothing))
                for block in self.blocks_of(stage, recompute)
            ]
            for stage in range(count)
        ]
        averaged = self.row is not None
        found = pipeline_volume(stages, received, tied, part, self.schedule, worker, zero, losses, averaged, again)
        return named(found, c)

    def holders(self, parameter: str) -> tuple[int, ...]:
        """The workers with a stage that has the parameter's layer, or a layer that shares its weight."""
        if parameter not in self._holders:
            known = self.aliases.get(parameter, parameter)
            owner = known.rpartition(".")[0]
            users = {
                spec.name
                for spec in self.specs
                if spec.name == owner or (parameter.endswith(".weight") and shared_owner(spec) == owner)
            }
            stages = [s for s in range(len(self.stages)) if any(belongs(user, self.modules_of(s)) for user in users)]
            self._holders[parameter] = tuple(sorted({row[s] for row in self.schedule.placement for s in stages}))
        return self._holders[parameter]


def shared_owner(spec: LayerSpec) -> str | None:
    """The layer whose weight this layer shares."""
    return getattr(spec, "shares", None)


def _gathering(specs: list[LayerSpec]) -> list[LayerSpec]:
    """Of layers with the same input, one gathers it. If that layer is in another stage, the first in this stage does."""
    first: dict[str, str] = {}
    names = {spec.name for spec in specs}
    found = []
    for spec in specs:
        if isinstance(spec, TracedLinearSpec) and spec.joins is not None and spec.joins not in names:
            gatherer = first.setdefault(spec.joins, spec.name)
            spec = replace(spec, joins=None if gatherer == spec.name else gatherer)
        found.append(spec)
    return found


def plan_stages(
    model: nn.Module,
    cut: AnyCut,
    grid: Grid,
    batch: Batch,
    schedule: Schedule,
    rest: ShardingPolicy,
    stages: Sequence[range] | None = None,
    ways: int = 1,
    example: Example | None = None,
    unchecked: bool = False,
) -> StagePlan:
    """Decide everything that needs no process group. Raises UserError for invalid requests.

    `stages`: the pieces of each stage; by default they are balanced by counted multiplications. `unchecked`: see
    `resolve`.
    """
    check(schedule)
    within("ways", ways)
    if schedule.updates is not Updates.FLUSH and len(schedule.homes) > len(schedule.workers):
        raise UserError(f"{schedule.name} updates weights within a step: it runs with one stage a worker, not several")
    if schedule.updates is not Updates.FLUSH and rest.precision == "fp8":
        raise UserError(
            f"{schedule.name} updates weights within a step, and the scales of FP8 are those of whole steps: use another"
            ' schedule, such as 1f1b or chimera, or precision = "model"'
        )
    if len(schedule.workers) != grid.pipe:
        raise UserError(
            f"{schedule.name} has {len(schedule.workers)} workers, and the grid {grid} has pipe={grid.pipe}"
        )
    count = len(portions(schedule))
    least = count * ways * grid.data * grid.z
    if batch.samples % least:
        strands = f" of {ways} strands" if ways > 1 else ""
        raise UserError(
            f"the batch of {counted(batch.samples, 'sample')} cannot be cut into {count} micro-batches{strands} on "
            f"data={grid.data}·z={grid.z}; it must be a multiple of {least}: {nearest_multiples(batch.samples, least)}"
        )
    part = Batch(batch.samples // (count * ways), batch.sequence)
    specs = resolve(model, cut, grid, rest, part, example, unchecked, portions=count * ways)
    norm = next(filter(None, map(_batch_norm, specs)), None)
    if norm is not None and count > 1:
        raise UserError(
            f"layer {norm} is a batch norm, whose statistics would be those of each of {count} micro-batches and not of the "
            "batch; use one micro-batch, or a group norm"
        )
    pieces = ModelPieces.of(model, cut, grid, part, specs)
    pieces.check(model, schedule.stages)
    modules = pieces.modules
    chosen = stages or partition(counted_costs(modules, specs), schedule.stages)
    if [piece for stage in chosen for piece in stage] != list(range(len(modules))) or len(chosen) != schedule.stages:
        raise UserError(
            f"the stages {chosen} do not have each of {len(modules)} pieces once, in {schedule.stages} stages"
        )
    tokens = not hasattr(model, "example")
    aliases = {} if pieces.row is None else _aliases(model, specs, grid, rest)
    blocks = blocks_of(model, specs)
    portion = ParallelConfig.exact(grid, rest, Batch(batch.samples // count, batch.sequence), item=1)
    return StagePlan(schedule, chosen, modules, specs, pieces.outputs, tokens, blocks, pieces.row, aliases, portion)


def _batch_norm(spec: LayerSpec) -> str | None:
    """Its name, if it normalises with the statistics of a batch."""
    ours = isinstance(spec, ImageNormSpec) and spec.groups is None
    return spec.name if ours or (isinstance(spec, TracedChannelNormSpec) and spec.of_batch) else None


def _aliases(model: nn.Module, specs: Sequence[LayerSpec], grid: Grid, rest: ShardingPolicy) -> dict[str, str]:
    """For parameters that several modules share: from their first name, which the model uses, to that of the cut layer."""
    config = ParallelConfig.exact(grid, rest, Batch(1, 1), item=1)
    first = {id(each): name for name, each in model.named_parameters()}
    stated = [name for spec in specs for name in parameters(spec, config)]
    return {own: name for name in stated if (own := first[id(model.get_parameter(name))]) != name}


# All groups of axes over which layers reduce gradients, besides replicas of their stage, and which layers use
# otherwise.
_GRADIENT_AXES = (("data",), ("data", "z"), ("data", "z", "y"), ("data", "z", "x"))
_LAYER_AXES = (("y", "z"), ("x", "y"))


def make_groups(network: Network, layout: StagePlan, rest: ShardingPolicy) -> None:
    """Create the process groups of all workers' layers, on all ranks in one order: workers have different layers."""
    gradient_axes: tuple[Axes, ...] = _GRADIENT_AXES
    layer_axes: tuple[Axes, ...] = _LAYER_AXES
    if layout.row is not None:
        config = ParallelConfig.exact(network.grid, rest, Batch(1, 1), item=1)
        used = {each.partial for spec in layout.specs for each in parameters(spec, config).values()}
        gradient_axes = (*gradient_axes, *sorted(used.difference(gradient_axes)))
        moved = {each.axes for spec in layout.specs for each in collectives(spec, config)}
        layer_axes = (*layer_axes, *sorted(moved | {axes[::-1] for axes in moved}))
    for axes in (*gradient_axes, *layer_axes):
        network.axis(*axes)
    for axis, count in sorted(shared_copies(layout.specs, network.grid)):
        network.neighbours(axis, count)
    owners = [spec.name for spec in layout.specs]
    for workers in sorted({layout.holders(f"{owner}.{kind}") for owner in owners for kind in ("weight", "bias")}):
        for axes in gradient_axes:
            network.across(workers, *axes)


@dataclass
class LocalStages:
    """The stages of a worker."""

    stages: dict[Home, Stage]
    models: dict[Home, nn.Module]
    parameters: dict[str, nn.Parameter]
    gradients: Gradients
    clock: Clock
    amax: AmaxHistory | None  # of the layers whose operands are rounded to FP8
    alike: bool = True  # all ranks of a place on the pipe axis use the same parameters


def hold(
    model: nn.Module,
    layout: StagePlan,
    network: Network,
    fill: Fill,
    rest: ShardingPolicy,
    recompute: Recompute,
    ways: int,
    compile: bool = False,
    record: Record | None = None,
    seed: int = 0,
    finish: Finish = lambda *_: None,
) -> LocalStages:
    """Build the stages of this rank's worker. A parameter that two of its stages share exists once.

    `compile`: torch compiles the code between collectives; whole blocks only if nothing within a block is recomputed.
    """
    make_groups(network, layout, rest)
    gradients, clock = Gradients(rest.gradients), Clock(seed)
    amax = amax_history(layout.specs, network, rest, gradients)
    held = LocalStages({}, {}, {}, gradients, clock, amax)
    homes = layout.schedule.held_by(network.coordinates["pipe"])
    # By stage: workers with the same stages must create the groups of their gradients in one order.
    for replica, stage in sorted(homes, key=lambda home: home[1]):
        own = deepcopy(model)
        if layout.row is None:
            _prune(own, layout, stage)
        under_way = layout.schedule.updates is not Updates.FLUSH
        state = CubeState(network, rest, gradients, clock=clock, updates_under_way=under_way, portioned=True, amax=amax)
        specs = layout.specs_of(stage)
        in_parts = recompute == "attention" or isinstance(recompute, Budget)
        local = compile and layout.row is None  # else `finish` compiles
        plain = whole_blocks(own, specs, network.grid) if local and not in_parts else {}
        replace_layers(own, specs, state, fill, held.parameters, layout.holders)
        if local:
            compile_local(own, plain, state)
        again = layout.blocks_of(stage, recompute)
        item = next(iter(held.parameters.values())).element_size()
        kept = layout.kept(network.coordinates["pipe"], recompute, item)
        if layout.row is not None:
            like = next(iter(held.parameters.values()))
            leave_out(own, layout.row, layout.modules_of(stage), layout.used_shapes(network.grid), like, network.device)
            finish(own, state, fill)
            recompute_blocks(own, again, specs, kept)
            of_row = RowStage(own, layout.row, layout.stages[stage], state, ways)
            runs: list[Run] = [of_row.run]
        else:
            recompute_blocks(own, again, specs, kept)
            pieces: list[Piece] = own.pieces()  # type: ignore[operator]
            runs, of_row = [pieces[number].run for number in layout.stages[stage]], None
        if recompute == "attention":
            _recompute_attention(own)
        if record is None:
            held.stages[replica, stage] = Stage(runs, state, ways, row=of_row)
        else:
            held.stages[replica, stage] = RecordedStage(runs, state, row=of_row, record=record, home=(replica, stage))
        held.models[replica, stage] = own
    first = {stated: name for name, stated in layout.aliases.items()}
    held.parameters = {first.get(name, name): each for name, each in held.parameters.items()}
    return held


def _recompute_attention(model: nn.Module) -> None:
    """Attention scores grow with the square of the sequence and are cheap to recompute."""
    for module in model.modules():
        if isinstance(module, AttentionCore):
            module.forward = partial(recomputed, module.forward)  # type: ignore[method-assign]


def _prune(model: nn.Module, layout: StagePlan, stage: int) -> None:
    kept = layout.modules_of(stage)
    for name in (name for names in layout.modules for name in names if name not in kept):
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, MissingStage())
