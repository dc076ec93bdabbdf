"""Replace the layers of a plain model by their forms on the cube."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from cubeloom.base import counter
from cubeloom.base.initial import Initial
from cubeloom.comm import Network
from cubeloom.parallel.buckets import Reduction
from cubeloom.parallel.check import Example
from cubeloom.parallel.compiled import compile_local, whole_blocks
from cubeloom.parallel.cut import Cut, Rest, Weights
from cubeloom.parallel.dropout import CubeDropout
from cubeloom.parallel.embedding import CubeEmbedding, CubeTable, TableWeight
from cubeloom.parallel.first_token import CubeFirstToken
from cubeloom.parallel.forms import (
    Batch,
    DropoutForm,
    EmbeddingForm,
    FirstTokenForm,
    Form,
    LinearForm,
    LossForm,
    NormForm,
    Spread,
    TableForm,
    WholeForm,
)
from cubeloom.parallel.head import CubeHead
from cubeloom.parallel.image_forms import (
    BatchNormForm,
    ConcatForm,
    GroupedForm,
    GroupNormForm,
    ImageForm,
    JoinForm,
    ShareForm,
    SliceForm,
    SquaredLossForm,
    StayForm,
    WeightedForm,
)
from cubeloom.parallel.image_layers import (
    CubeConcat,
    CubeGrouped,
    CubeJoin,
    CubeShare,
    CubeSlice,
    CubeSquaredLoss,
    CubeStay,
)
from cubeloom.parallel.image_norms import CubeBatchNorm, CubeGroupNorm
from cubeloom.parallel.linear import CubeLinear
from cubeloom.parallel.loss import CubeCrossEntropy
from cubeloom.parallel.norm import CubeNorm
from cubeloom.parallel.parameter import Block, distribute, own_part
from cubeloom.parallel.products import Convolution, Convolve, Matmul, Product
from cubeloom.parallel.resolve import resolve
from cubeloom.parallel.state import CubeState
from cubeloom.parallel.weight import Weight

# Fills a rank's block of a parameter: from the name and the block to its values.
Fill = Callable[[str, Block], Tensor]


class Initialised(Protocol):
    """A model that says how its parameters start."""

    def initial(self, name: str) -> Initial: ...


def initial_values(model: Initialised, seed: int, dtype: torch.dtype, device: torch.device | None = None) -> Fill:
    """Values that depend on seed, name and place alone: any two grids start from the same model, bit for bit."""

    def fill(name: str, block: Block) -> Tensor:
        return block.draw(model.initial(name), counter.key(seed, name), dtype, device or torch.device("cpu"))

    return fill


def materialise(model: nn.Module, fill: Fill, modules: Iterable[str] = ("",)) -> nn.Module:
    """The serial model: give a model built on the meta device whole parameters; or only some of its modules, by name."""
    names: dict[int, str] = {}  # the first of each parameter
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    made: dict[int, nn.Parameter] = {}
    for module in (model.get_submodule(name) for name in modules):
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if id(parameter) not in made:
                shape = tuple(parameter.shape)
                value = fill(names[id(parameter)], Block(shape, (0,) * len(shape), shape))
                made[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, made[id(parameter)])
        for norm in module.modules():
            if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and norm.running_mean is not None:
                _start_running(norm, next(iter(made.values())))
    return model


def _start_running(norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d, like: Tensor) -> None:
    """Running statistics, as torch starts them."""
    for name in ("running_mean", "running_var"):
        setattr(norm, name, torch.empty(norm.num_features, dtype=like.dtype, device=like.device))
    norm.num_batches_tracked = torch.zeros((), dtype=torch.long, device=like.device)
    norm.reset_running_stats()


def apply(
    model: nn.Module,
    cut: Cut,
    network: Network,
    batch: Batch,
    fill: Fill,
    rest: Rest | None = None,
    compile: bool = False,
    example: Example | None = None,
    unchecked: bool = False,
) -> CubeState:
    """Cut a model, built on the meta device, over the cube, in place. Gives what its layers share: clock and gradients.

    `compile`: let torch compile what is computed between collectives. Raises CutError, before anything is allocated, if the
    model cannot be cut on this grid, or would compute something else than the serial one: see `resolve`, also for `example`
    and `unchecked`.
    """
    rest = rest or Rest()
    forms = resolve(model, cut, network.grid, rest, batch, example, unchecked)
    state = CubeState.of(network, rest)
    plain = whole_blocks(model, forms, network.grid) if compile else {}
    replace_layers(model, forms, state, fill)
    network.models.add(model)
    if compile:
        compile_local(model, plain, state)
    return state


# The places on the pipe axis that hold a parameter of this name.
Holders = Callable[[str], tuple[int, ...]]


def replace_layers(
    model: nn.Module,
    forms: list[Form],
    state: CubeState,
    fill: Fill,
    known: dict[str, nn.Parameter] | None = None,
    holders: Holders | None = None,
) -> None:
    """Build the layers of these forms in the model's place of each: frozen and evaluating where the plain ones are.

    `known` has the parameters that this rank holds already, by name, and takes the new ones: a name is one parameter.
    """
    builder = _Builder(model, state, fill, {} if known is None else known, holders)
    for form in forms:
        owner, _, attribute = form.name.rpartition(".")
        training = model.get_submodule(form.name).training
        setattr(model.get_submodule(owner), attribute, builder.build(form).train(training))


class _Builder:
    def __init__(
        self,
        model: nn.Module,
        state: CubeState,
        fill: Fill,
        known: dict[str, nn.Parameter],
        holders: Holders | None,
    ) -> None:
        self._plain = dict(model.named_modules())
        self._frozen: set[str] = set()
        self._state = state
        self._fill = fill
        self._known = known
        self._holders = holders
        self._weights: dict[str, Weight] = {}

    def build(self, form: Form) -> nn.Module:
        for kind, parameter in self._plain[form.name].named_parameters(recurse=False):
            if not parameter.requires_grad:
                # A weight that is shared has the name of the layer that it is of, which another stage may hold.
                owner = (getattr(form, "shares", None) if kind == "weight" else None) or form.name
                self._frozen.add(f"{owner}.{kind}")
        match form:
            case LinearForm():
                return self._linear(form)
            case NormForm():
                return self._norm(form)
            case EmbeddingForm():
                return CubeEmbedding(form, self._state, self._embedding_weight(form))
            case TableForm():
                return CubeTable(form, self._state, self._table_weight(form))
            case DropoutForm():
                return CubeDropout(form, self._state)
            case LossForm():
                return CubeCrossEntropy(form, self._state)
            case FirstTokenForm():
                return CubeFirstToken(form, self._state)
            case WholeForm():
                return self._whole(form)
            case ImageForm():
                return self._image(form)
        raise TypeError(f"no layer for {type(form).__name__}")

    def _parameter(
        self, name: str, shape: tuple[int, ...], cuts: Mapping[str, int], summed_over: tuple[str, ...]
    ) -> nn.Parameter:
        if name in self._known:
            return self._known[name]
        network = self._state.network
        block = Block.of(network, shape, cuts)
        parameter = distribute(network, self._fill(name, block), shape, cuts)
        workers = (network.coordinates["pipe"],) if self._holders is None else self._holders(name)
        ranks = network.grid.data * network.grid.z
        reduction = Reduction(name, network.across(workers, *summed_over), ranks)
        self._state.gradients.register(parameter, reduction)
        parameter.requires_grad_(name not in self._frozen)
        self._known[name] = parameter
        return parameter

    def _weight(self, owner: str, mode: Weights, shape: tuple[int, ...], cuts: Mapping[str, int]) -> Weight:
        """The weight of that layer: cut over the plane, and over z in the first dimension, within what the plane leaves."""
        if owner not in self._weights:
            replicated = mode == "replicated"
            if not replicated:
                cuts = {**cuts, "z": 0}
            parameter = self._parameter(f"{owner}.weight", shape, cuts, ("data", "z") if replicated else ("data",))
            axis = self._state.network.axis("z")
            self._weights[owner] = Weight(parameter, axis, mode, self._state.chain, owner)
        return self._weights[owner]

    def _linear(self, form: LinearForm) -> CubeLinear:
        owner = form.shares or form.name
        plain = self._plain[form.name]
        assert isinstance(plain, nn.Linear | Convolution)
        first, second = (form.k_axis, form.n_axis) if form.transposed else (form.n_axis, form.k_axis)
        weight = self._weight(owner, form.weights, tuple(plain.weight.shape), {first: 0, second: 1})
        bias = None
        if form.bias:
            bias = self._parameter(f"{form.name}.bias", (form.n,), {form.bias_axis: 0}, form.bias_replicas)
        make = CubeHead if form.with_loss else CubeLinear
        return make(form, self._state, weight, bias, product_of(plain))

    def _image(self, form: ImageForm) -> nn.Module:
        state, plain, side = self._state, self._plain[form.name], form.side
        match form:
            case SliceForm():
                return CubeSlice(form, state, *self._edge(form, plain, {side: _out_dim(plain)}, {side: 0}))
            case JoinForm():
                return CubeJoin(form, state, *self._edge(form, plain, {side: 1 - _out_dim(plain)}, {}))
            case StayForm():
                return CubeStay(form, state, *self._edge(form, plain, {side: 1 - _out_dim(plain)}, {side: 0}))
            case GroupedForm():
                groups = form.groups // state.network.axis(side).size
                return CubeGrouped(form, state, *self._edge(form, plain, {side: 0}, {side: 0}, groups))
            case ShareForm():
                return CubeShare(form, state)
            case ConcatForm():
                return CubeConcat(form, state)
            case SquaredLossForm():
                return CubeSquaredLoss(form, state)
            case GroupNormForm():
                assert isinstance(plain, nn.GroupNorm)
                group_of = None if form.local(state.network.grid) else self._own(groups_of(plain), side)
                return CubeGroupNorm(form, state, *self._vectors(form, plain), plain.eps, group_of)
            case BatchNormForm():
                assert isinstance(plain, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
                return CubeBatchNorm(form, state, *self._vectors(form, plain), plain)
        raise TypeError(f"no layer for {type(form).__name__}")

    def _edge(
        self,
        form: WeightedForm,
        plain: nn.Module,
        weight_cuts: Mapping[str, int],
        bias_cuts: Mapping[str, int],
        groups: int = 1,
    ) -> tuple[nn.Parameter, nn.Parameter | None, Product]:
        assert isinstance(plain, nn.Linear | Convolution)
        weight = self._parameter(f"{form.name}.weight", tuple(plain.weight.shape), weight_cuts, form.weight_axes)
        bias = None
        if plain.bias is not None:
            bias = self._parameter(f"{form.name}.bias", tuple(plain.bias.shape), bias_cuts, form.row_axes)
        return weight, bias, product_of(plain, groups)

    def _vectors(self, form: ImageForm, plain: nn.Module) -> tuple[nn.Parameter | None, nn.Parameter | None]:
        weight, bias = (
            None
            if (own := getattr(plain, name)) is None
            else self._parameter(f"{form.name}.{name}", tuple(own.shape), {form.side: 0}, form.row_axes)
            for name in ("weight", "bias")
        )
        return weight, bias

    def _own(self, features: Tensor, side: str) -> Tensor:
        return own_part(self._state.network.axis(side))(features)

    def _norm(self, form: NormForm) -> CubeNorm:
        rows = ("data", "z", "y") if form.rows == Spread.ROWS else ("data", "z")
        plain = self._plain[form.name]
        assert isinstance(plain, nn.LayerNorm | nn.RMSNorm)
        weight, bias = (
            self._parameter(f"{form.name}.{name}", (form.features,), {"x": 0}, rows) if wanted else None
            for name, wanted in (("weight", plain.elementwise_affine), ("bias", form.bias))
        )
        return CubeNorm(form, self._state, weight, bias, plain.eps)

    def _embedding_weight(self, form: EmbeddingForm) -> Weight:
        return self._weight(form.name, form.weights, (form.entries, form.features), {"y": 0, "x": 1})

    def _table_weight(self, form: TableForm) -> Weight:
        network, shape, name = self._state.network, (form.entries, form.features), f"{form.name}.weight"
        cut_rows = form.rows == Spread.ROWS
        if not form.sharded:
            summed_over = ("data", "z", "y") if cut_rows else ("data", "z")
            parameter = self._parameter(name, shape, {"x": 1}, summed_over)
            return Weight(parameter, network.axis("z"), "replicated", self._state.chain, form.name)
        parameter = self._parameter(name, shape, {"x": 1, "y": 0, "z": 0}, ("data",))
        make = Weight if cut_rows else partial(TableWeight, network)
        return make(parameter, network.axis("y", "z"), "freed", self._state.chain, form.name)

    def _whole(self, form: WholeForm) -> nn.Module:
        weight = self._parameter(f"{form.name}.weight", (form.n, form.k), {}, ("data", "z"))
        bias = self._parameter(f"{form.name}.bias", (form.n,), {}, ("data", "z")) if form.bias else None
        return _WholeLinear(self._state, weight, bias)


def product_of(layer: nn.Linear | Convolution, groups: int = 1) -> Product:
    return Matmul() if isinstance(layer, nn.Linear) else Convolve.like(layer, groups)


def _out_dim(layer: nn.Module) -> int:
    """Which of a weight's first two dimensions its output features are."""
    return int(bool(getattr(layer, "transposed", False)))


def groups_of(norm: nn.GroupNorm) -> Tensor:
    """The group of each feature. One that follows a concatenation in turns says the order of its features."""
    plain = torch.arange(norm.num_channels) // (norm.num_channels // norm.num_groups)
    order = getattr(norm, "order", None)
    return plain if order is None else plain[torch.tensor(order)]


class _WholeLinear(nn.Module):
    def __init__(self, state: CubeState, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self._state = state

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self._state.local(self.bias)
        return functional.linear(x, self._state.local(self.weight), bias)
