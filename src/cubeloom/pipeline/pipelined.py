"""`cubeloom.pipeline`: a pipeline of any model over a mesh with a pipe axis, for your own training loop."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base.divisors import nearest_multiples
from cubeloom.base.errors import UserError
from cubeloom.comm.batch import part_of
from cubeloom.comm.mesh import Mesh, network_of
from cubeloom.models.buffers import compute_buffers
from cubeloom.models.example import example_of
from cubeloom.models.external import forwarding_loss
from cubeloom.models.parallelize import HANDLE, Example, Handle, cut_for, sequence_of, without_values
from cubeloom.parallel import AnyCut, Batch, ShardingPolicy
from cubeloom.parallel.replace import Fill
from cubeloom.parallel.traced import Plan, Tracing
from cubeloom.parallel.traced.values import own_values, refuse_different_values
from cubeloom.pipeline import Schedule, Updates, generate, overlapped
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.pipeline.runtime.build import Recompute, StagePlan
from cubeloom.pipeline.runtime.channels import Shape
from cubeloom.pipeline.runtime.microbatches import portions
from cubeloom.pipeline.runtime.partition import belongs

_TRACED = ShardingPolicy(activations="replicated")


def pipeline(
    model: nn.Module,
    mesh: Mesh,
    schedule: str | Schedule = "1f1b",
    microbatches: int | None = None,
    *,
    cut: AnyCut | None = None,
    plan: Plan | None = None,
    example: Example | None = None,
    fill: Fill | None = None,
    rest: ShardingPolicy | None = None,
    batch: tuple[int, int] | None = None,
    ways: int = 1,
    recompute: Recompute = False,
    compile: bool = False,
) -> Pipelined:
    """Build the stages of a model that this rank of the mesh holds, ready to be trained. The model itself stays
    unchanged.

    `schedule`: a name that `cubeloom schedule` knows, with this many `microbatches` (by default two per worker), or a
    schedule as a value. The other arguments are those of `parallelize`; `example` has the keyword arguments of one
    forward. `ways`: strands of a weave. `recompute`: blocks of all stages, or of those named, recompute their forward in
    their backward. `compile`: torch compiles what blocks compute between collectives. Raises UserError for invalid
    requests, such as a model whose forward calls no row of blocks.
    """
    network = network_of(mesh)
    if network.grid.pipe == 1:
        raise UserError(f"the grid {network.grid} has no pipe axis: use cubeloom.parallelize")
    planned = _schedule(schedule, network.grid.pipe, microbatches)
    plain = _without_memory(model)
    empty = any(parameter.is_meta for parameter in model.parameters())
    filled = not empty or fill is not None
    if fill is None and not empty:
        refuse_different_values(model, network)
        fill = own_values(model)
    elif fill is None:
        compute_buffers(plain)
        fill = without_values(plain)
    cut = cut_for(model, cut, plan)
    if plan is not None and hasattr(plain, "pieces"):
        raise UserError(f"{type(model).__name__} says itself how stages cut it, and then a cut is needed, not a plan")
    if not hasattr(plain, "pieces"):
        given = example or example_of(model)
        plain = forwarding_loss(plain, in_double=False)
        cut = cut or Tracing(lambda _: given, plan)
        rest = rest or _TRACED
    assert cut is not None
    grid, parts = network.grid, len(portions(planned)) * ways
    samples, sequence = batch or (parts * grid.data * grid.z * grid.x * grid.y, sequence_of(model))
    whole = Batch(samples, sequence)
    made = Pipeline(plain, cut, network, whole, fill, planned, rest, recompute=recompute, ways=ways, compile=compile)
    handle = Handle(network, None, None, filled, type(model).__name__, getattr(model, "config", None), made.amax)
    return Pipelined(model, plain, made, handle)


def _schedule(schedule: str | Schedule, workers: int, microbatches: int | None) -> Schedule:
    if isinstance(schedule, Schedule):
        if microbatches is not None and microbatches != schedule.microbatches:
            raise UserError(f"the schedule has {schedule.microbatches} micro-batches, and microbatches={microbatches}")
        planned = schedule
    else:
        planned = overlapped(generate(schedule, workers, 2 * workers if microbatches is None else microbatches))
    if planned.updates is not Updates.FLUSH:
        raise UserError(
            f"{planned.name} updates weights within a step, where a loop's own optimizer cannot: use one that updates after"
            " it, such as 1f1b or chimera, or cubeloom.pipeline.runtime.Pipeline"
        )
    return planned


def _without_memory(model: nn.Module) -> nn.Module:
    """A copy whose parameters are on the meta device."""
    memo: dict[int, Any] = {}
    for each in model.parameters():
        empty = torch.empty(each.shape, dtype=each.dtype, device="meta")
        memo[id(each)] = nn.Parameter(empty, requires_grad=each.requires_grad)
    return deepcopy(model, memo)


class Pipelined(nn.Module):
    """This rank's stages. Its parameters have their names in the model."""

    def __init__(self, model: nn.Module, plain: nn.Module, made: Pipeline, handle: Handle) -> None:
        super().__init__()
        self.config = getattr(model, "config", None)
        self.generation_config = getattr(model, "generation_config", None)
        self._kind = type(model).__name__
        self._takes = inspect.signature(model.forward).parameters
        self._aliases = _aliases(plain)
        self._made, self._steps, self._shapes = made, 0, dict[str, Shape | None]()
        object.__setattr__(self, HANDLE, handle)

    @property
    def plan(self) -> StagePlan:
        """The modules of each stage, and the layers of these modules."""
        return self._made.layout

    @property
    def handle(self) -> Handle:
        handle: Handle = vars(self)[HANDLE]
        return handle

    def step(self, batch: Mapping[str, Any]) -> Tensor:
        """Run forward and backward of all micro-batches; return the mean loss of the whole batch, on every rank.

        `batch`: the keyword arguments of the model's forward, with this rank's samples: `mesh.shard(batch)`. Gradients
        are added to those that parameters already have.
        """
        data = self._ready(batch)
        loss = self._made.launch(data, self._steps)
        self._steps += 1
        return loss

    def evaluate(self, batch: Mapping[str, Any]) -> float:
        """The mean loss of the whole batch, without gradients and without dropout."""
        return self._made.evaluate(self._ready(batch))

    def forward(self, *_: Any, **__: Any) -> Any:
        raise UserError("a pipeline has forward and backward together: call its step(batch), or evaluate(batch)")

    def _ready(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        if not self.handle.filled:
            raise UserError(
                f"this {self._kind} was built on the meta device and has no values yet: call cubeloom.load(model, folder)"
            )
        device = self.handle.network.device
        batch = {name: part_of(each) for name, each in batch.items()}
        data = {name: each.to(device) if isinstance(each, Tensor) else each for name, each in batch.items()}
        self._check(data)
        shapes = {name: Shape.of(each) if isinstance(each, Tensor) else None for name, each in data.items()}
        if shapes != self._shapes:
            self._made.learn(data)
            self._shapes = shapes
        return data

    def _check(self, data: Mapping[str, Any]) -> None:
        any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in self._takes.values())
        unknown = [name for name in data if name not in self._takes and not any_name]
        if unknown:
            raise UserError(f"{self._kind}.forward takes {', '.join(self._takes)}, and the batch has {unknown[0]!r}")
        sizes = {name: each.shape[0] for name, each in data.items() if isinstance(each, Tensor) and each.dim()}
        if len(set(sizes.values())) != 1:
            raise UserError(f"all tensors of a batch have samples as their first dimension, and these differ: {sizes}")
        samples, least = next(iter(sizes.values())), len(portions(self._made.schedule)) * self._made.ways
        if samples % least:
            raise UserError(
                f"{samples} samples of a rank cannot be cut into {least} micro-batches; they must be a multiple of it: "
                f"{nearest_multiples(samples, least)}"
            )

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        start = f"{prefix}." if prefix else ""
        for name, each in self._made.parameters.items():
            yield start + name, each
            if not remove_duplicate:
                for alias in self._aliases.get(name, ()):
                    yield start + alias, each

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        start, seen = f"{prefix}." if prefix else "", set[str]()
        for stage, model in self._made.models:
            modules = self.plan.modules_of(stage)
            for name, each in model.named_buffers(remove_duplicate=remove_duplicate):
                if name not in seen and belongs(name.rpartition(".")[0], modules):
                    seen.add(name)
                    yield start + name, each

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self._made.parameters.values())

    def state_dict(self, *_: Any, keep_vars: bool = False, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        """The parameters and buffers of which this rank has a block, by name."""
        kept = {name for _, model in self._made.models for name in nn.Module.state_dict(model)}
        found: dict[str, Tensor] = dict(self.named_parameters())
        found |= {name: each for name, each in self.named_buffers() if name in kept}
        return found if keep_vars else {name: each.detach() for name, each in found.items()}

    def load_state_dict(self, *args: Any, **named: Any) -> Any:
        raise UserError("a rank has some stages of a pipeline only: load with cubeloom.load(pipeline, folder)")

    def train(self, mode: bool = True) -> Pipelined:
        super().train(mode)
        for _, model in self._made.models if "_made" in vars(self) else ():
            model.train(mode)
        return self


def _aliases(plain: nn.Module) -> dict[str, list[str]]:
    """The other names of parameters that several modules share."""
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, each in plain.named_parameters(remove_duplicate=False):
        owner = first.setdefault(id(each), name)
        if owner != name:
            found.setdefault(owner, []).append(name)
    return found
