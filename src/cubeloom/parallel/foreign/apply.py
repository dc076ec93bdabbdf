"""Replace the layers of a foreign model by those of a proposal, and distribute all its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch import Tensor, nn

from cubeloom.base import torch_private
from cubeloom.base.errors import UserError
from cubeloom.comm import Network
from cubeloom.parallel.buckets import Reduction
from cubeloom.parallel.config import ShardingPolicy
from cubeloom.parallel.foreign.known import product_of, sizes_of
from cubeloom.parallel.foreign.layers import ForeignLinear
from cubeloom.parallel.foreign.loss import average_losses
from cubeloom.parallel.foreign.placed import WHOLE_AXES, Placed, bias_axes, config_of
from cubeloom.parallel.foreign.whole import read_locally
from cubeloom.parallel.parameter import Block, distribute
from cubeloom.parallel.replace import Fill
from cubeloom.parallel.specs import parameters
from cubeloom.parallel.state import CubeState
from cubeloom.parallel.weight import Weight


def replace_layers(module: nn.Module, layers: Iterable[Placed], network: Network, fill: Fill | None) -> CubeState:
    """In place. Without `fill` each rank takes its blocks from the values that the module has."""
    if fill is None:
        _refuse_different_values(module, network)
    state = CubeState.of(network, ShardingPolicy(activations="replicated"))
    maker = _Maker(module, state, fill or _own_values(module))
    for layer in layers:
        maker.replace(layer)
    for each in list(module.modules()):
        if not isinstance(each, ForeignLinear):
            maker.leave_whole(each)
    maker.place_buffers()
    average_losses(module, state)
    network.models.add(module)
    return state


def _refuse_different_values(module: nn.Module, network: Network) -> None:
    """Blocks of one parameter are taken from different ranks, and what stays whole must be the same on all."""
    mine = {name: _bits(parameter) for name, parameter in module.named_parameters() if not parameter.is_meta}
    for rank, other in enumerate(network.host_group.gather(mine)):
        name = next((name for name in mine if other.get(name) != mine[name]), None)
        if name is not None:
            raise UserError(
                f"ranks have different values of {name}: rank {rank} differs from rank {network.rank}. Give all ranks the same"
                " seed before the model is built, or load the same weights on all"
            )


def _bits(tensor: Tensor) -> int:
    """A sum over the bits of a tensor, which equal tensors have in common, and others hardly ever."""
    whole = _WHOLE_NUMBERS[tensor.element_size()]
    return int(tensor.detach().contiguous().view(whole).sum(dtype=torch.int64).item())


_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _own_values(module: nn.Module) -> Fill:
    values = dict(module.named_parameters()) | dict(module.named_buffers())

    def fill(name: str, block: Block) -> Tensor:
        value = values[name].detach()
        if value.is_meta:
            raise UserError(
                f"{name} has no values: it is on the meta device; give `apply` a `fill`, or a module with values"
            )
        return value[block.slices]

    return fill


class _Maker:
    def __init__(self, module: nn.Module, state: CubeState, fill: Fill) -> None:
        self._module, self._state, self._fill = module, state, fill
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._made: dict[int, nn.Parameter] = {}
        self._places: dict[int, list[str]] = {}  # where each module is
        for name, each in module.named_modules(remove_duplicate=False):
            self._places.setdefault(id(each), []).append(name)

    def replace(self, layer: Placed) -> None:
        spec, plain = layer.spec, self._module.get_submodule(layer.name)
        sizes = sizes_of(plain)
        if sizes is None or (sizes.k, sizes.n) != (spec.k, spec.n):
            raise UserError(
                f"the proposal has a layer {layer.name} of {spec.k} to {spec.n} features; this module has not"
            )
        config = config_of(self._state.network.grid, layer.sharded)
        stated = parameters(spec, config)[f"{spec.name}.weight"]
        own = torch_private.parameters_of(plain)
        parameter = self._parameter(own["weight"], stated.cuts, stated.partial)
        weight = Weight(
            parameter,
            self._state.network.axis("z"),
            "freed" if layer.sharded else "replicated",
            self._state.prefetch_order,
            layer.name,
        )
        bias = self._parameter(own["bias"], {spec.bias_axis: 0}, bias_axes(spec)) if spec.bias else None
        made = ForeignLinear(layer, self._state, weight, bias, product_of(plain))
        # The model around it may ask for `in_features` and the like.
        for name, value in vars(plain).items():
            if not name.startswith("_"):
                setattr(made, name, value)
        for place in self._places[id(plain)]:
            owner, _, attribute = place.rpartition(".")
            setattr(self._module.get_submodule(owner), attribute, made)

    def leave_whole(self, module: nn.Module) -> None:
        parameters = torch_private.parameters_of(module)
        own = {name: each for name, each in parameters.items() if each is not None}
        for name, parameter in own.items():
            parameters[name] = self._parameter(parameter, {}, WHOLE_AXES)
        if own:
            read_locally(module, list(own), self._state)

    def place_buffers(self) -> None:
        for name, buffer in list(self._module.named_buffers()):
            owner, _, attribute = name.rpartition(".")
            value = self._values(name, tuple(buffer.shape), {}) if buffer.is_meta else buffer
            torch_private.buffers_of(self._module.get_submodule(owner))[attribute] = value.to(
                self._state.network.device
            )

    def _values(self, name: str, shape: tuple[int, ...], cuts: Mapping[str, int]) -> Tensor:
        block = self._fill(name, Block.of(self._state.network, shape, cuts))
        return block.to(self._state.network.device, memory_format=torch.contiguous_format, copy=True)

    def _parameter(
        self, plain: nn.Parameter | None, cuts: Mapping[str, int], summed_over: tuple[str, ...]
    ) -> nn.Parameter:
        """One for each of the module's, however many modules share it."""
        assert plain is not None
        if id(plain) not in self._made:
            shape, network = tuple(plain.shape), self._state.network
            values = self._values(self._names[id(plain)], shape, cuts)
            made = distribute(network, values, shape, cuts)
            # Ranks of the plane compute the same gradient, but for rounding that a GPU's kernels do not repeat.
            alike = prod(network.grid.size(axis) for axis in summed_over if axis in ("x", "y"))
            ranks = network.grid.data * network.grid.z * alike
            reduction = Reduction(self._names[id(plain)], network.axis(*summed_over), ranks)
            self._state.gradients.register(made, reduction)
            made.requires_grad_(plain.requires_grad)
            self._made[id(plain)] = made
        return self._made[id(plain)]
