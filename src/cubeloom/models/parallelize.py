"""`cubeloom.parallelize`: any model over a mesh, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.comm import Network
from cubeloom.comm.mesh import Mesh, network_of
from cubeloom.models.buffers import compute_buffers
from cubeloom.models.example import example_of
from cubeloom.parallel.boundary import Boundary, at_boundary
from cubeloom.parallel.config import Batch, ShardingPolicy
from cubeloom.parallel.fp8 import AmaxHistory
from cubeloom.parallel.layers import AnyCut
from cubeloom.parallel.parameter import Block
from cubeloom.parallel.recomputed import blocks_of, recompute_blocks
from cubeloom.parallel.replace import Fill, apply_specs
from cubeloom.parallel.resolution import looked_at, refuse_fp8_of_found
from cubeloom.parallel.state import CubeState
from cubeloom.parallel.traced import Plan, Traced, trace
from cubeloom.parallel.traced.styles import Origin
from cubeloom.parallel.traced.values import own_values
from cubeloom.parallel.weave import run_in_strands

HANDLE = "_cubeloom"
Example = Mapping[str, Any]


@dataclass
class Handle:
    """What is known about a parallelized model.

    `filled`: its parameters have values. `kind`, `config`: of the original model; on a rank with some of the heads the
    model's own configuration may differ.
    """

    network: Network
    state: CubeState | None  # None for a pipeline, whose stages have one each
    report: Traced | None
    filled: bool
    kind: str
    config: Any
    amax: AmaxHistory | None = None  # of linears whose operands are rounded to FP8


def handle_of(model: nn.Module) -> Handle:
    handle = vars(model).get(HANDLE)
    if not isinstance(handle, Handle):
        raise UserError(
            f"this {type(model).__name__} was not parallelized: call cubeloom.parallelize(model, mesh) or"
            " cubeloom.pipeline first"
        )
    return handle


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    cut: AnyCut | None = None,
    plan: Plan | None = None,
    example: Example | None = None,
    fill: Fill | None = None,
    rest: ShardingPolicy | None = None,
    batch: tuple[int, int] | None = None,
    ways: int = 1,
    recompute: bool = False,
    compile: bool = False,
) -> Traced:
    """Replace the layers of a model by this rank's sharded layers, in place; return the report of what is where.

    The model is any `nn.Module`. It either has values, which must be the same on all ranks, or is on the meta device;
    then `load` or `fill` provides them. Each rank keeps only its blocks.

    `cut`: how the layers are sharded, by name (see `docs/cube.md`). For our models it is known, and any other model is
    traced: it is run once without values on `example`, the keyword arguments of one rank's forward. Hugging Face's
    language models and models whose forward takes tokens need no example. `plan`: how some layers are sharded, from
    names to styles of Hugging Face's `tp_plan`, such as "colwise"; tracing finds the rest. `batch`: samples of a step
    over the whole mesh and tokens per sample, for a cut that cuts samples further. `rest`: how activations and weights
    are stored with such a cut. `recompute`: each block of the model's row of blocks keeps only its input, and
    recomputes its forward in the backward.

    `ways`: a forward that builds a graph runs as this many strands of its samples. One computes while another waits for a
    collective. `compile`: torch compiles what blocks compute between collectives.
    """
    network = network_of(mesh)
    if network.grid.pipe > 1:
        raise UserError(f"the grid {network.grid} has pipe={network.grid.pipe}: use cubeloom.pipeline")
    if HANDLE in vars(model):
        raise UserError(f"this {type(model).__name__} is parallelized already")
    empty = any(parameter.is_meta for parameter in model.parameters())
    filled = not empty or fill is not None
    if empty and fill is None:
        compute_buffers(model)
        fill = without_values(model)
    config = getattr(model, "config", None)
    origin: Origin = "own" if cut is None else "given"
    cut = cut_for(model, cut, plan)
    if cut is None:
        refuse_fp8_of_found(rest or ShardingPolicy())
        report = trace(model, network.grid, example or example_of(model), plan=plan)
        state = report.apply(model, network, fill, compile)
    else:
        rest, portions = rest or ShardingPolicy(), _Portions(batch, ways, compile)
        report, state = _by_cut(model, cut, network, fill or own_values(model), rest, portions, example)
        report = replace(report, origins=dict.fromkeys((spec.name for spec in report.specs), origin))
    if recompute:
        recompute_blocks(model, blocks_of(model, report.specs), report.specs)
    object.__setattr__(model, HANDLE, Handle(network, state, report, filled, type(model).__name__, config, state.amax))
    run_in_strands(model, ways, state.staggers)
    model.register_forward_pre_hook(_check_ready)
    return report


def _check_ready(model: nn.Module, _: Any) -> None:
    if torch.compiler.is_compiling():
        _refuse_compiler()
    if not handle_of(model).filled:
        raise UserError(
            f"this {type(model).__name__} was built on the meta device and has no values yet: call cubeloom.load(model, folder)"
        )


@torch_private.left_to_python
def _refuse_compiler() -> NoReturn:
    raise UserError(
        "torch.compile cannot trace communication, and so no model that was parallelized: leave it out, and have"
        " cubeloom.parallelize(model, mesh, compile=True) compile what lies between collectives"
    )


def cut_for(model: nn.Module, cut: AnyCut | None, plan: Plan | None) -> AnyCut | None:
    """The cut of one of our models, or the given one; None if the model must be traced."""
    if cut is not None and plan is not None:
        raise UserError("a cut says how every layer lies: give it or a plan, not both")
    return cut or (own_cut(model) if plan is None else None)


def own_cut(model: nn.Module) -> AnyCut | None:
    from cubeloom.models.cuts import cut_of

    try:
        return cut_of(model)
    except TypeError:
        return None


@dataclass(frozen=True)
class _Portions:
    """What a step runs with: the batch, in strands, compiled or not."""

    batch: tuple[int, int] | None
    ways: int
    compile: bool


def _by_cut(
    model: nn.Module,
    cut: AnyCut,
    network: Network,
    fill: Fill,
    rest: ShardingPolicy,
    portions: _Portions,
    example: Example | None,
) -> tuple[Traced, CubeState]:
    grid = network.grid
    ways = portions.ways
    samples, sequence = portions.batch or (ways * grid.data * grid.z * grid.x * grid.y, sequence_of(model))
    whole, item = Batch(samples // ways, sequence), next((each.element_size() for each in model.parameters()), 4)
    maker: Callable[[int], Example] | None = None if example is None else (lambda _: example)
    specs, outputs = looked_at(model, cut, grid, rest, whole, maker, portions=ways)
    state = apply_specs(model, cut, specs, network, whole, fill, rest, portions.compile)
    at_boundary(model, Boundary(network, outputs))
    return Traced(
        type(model).__name__, grid, tuple(specs), item, (0.0, 0.0), samples=samples // (grid.data * grid.z), rest=rest
    ), state


def sequence_of(model: nn.Module) -> int:
    return int(getattr(model, "positions_most", 1) or 1)


def without_values(model: nn.Module) -> Fill:
    """Blocks that `load` will fill, and buffers, which have their values."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))

    def fill(name: str, block: Block) -> Tensor:
        if name in parameters:
            return torch.zeros(block.local, dtype=parameters[name].dtype, device="cpu")
        return buffers[name][block.slices]

    return fill
