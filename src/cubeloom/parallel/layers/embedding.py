"""Lookup tables: the embedding, whose vocabulary is cut, and small tables that each rank gathers whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from cubeloom.comm import Network, Pending
from cubeloom.parallel import weave
from cubeloom.parallel.collective import Collective
from cubeloom.parallel.gradients import Gradients, WeightGradient
from cubeloom.parallel.layers.declared import Declared, Making, Seen, make_layer
from cubeloom.parallel.layers.indices import check_indices
from cubeloom.parallel.parameter import own_part
from cubeloom.parallel.products import add_to
from cubeloom.parallel.specs import EmbeddingSpec, TableSpec
from cubeloom.parallel.state import CubeState
from cubeloom.parallel.weight import Weight


@dataclass(frozen=True)
class Embedding(Declared):
    """An embedding looked up by token: vocabulary over y, features over x, shards over z."""

    def spec(self, name: str, module: nn.Module, seen: Seen) -> EmbeddingSpec | None:
        if not isinstance(module, nn.Embedding):
            return None
        return EmbeddingSpec(name=name, entries=module.num_embeddings, features=module.embedding_dim)


@dataclass(frozen=True)
class Table(Declared):
    """A small table that every rank looks up for its own rows, such as positions: features over x, entries over y and
    z.
    """

    def spec(self, name: str, module: nn.Module, seen: Seen) -> TableSpec | None:
        if not isinstance(module, nn.Embedding):
            return None
        return TableSpec(name=name, entries=module.num_embeddings, features=module.embedding_dim)


class CubeEmbedding(nn.Module):
    """Vocabulary over y, features over x, shards over z: `[V/(y·z), H/x]`, the layout of a head's weight.

    Each rank looks up the tokens of its z rank that are in its part of the vocabulary, `[M/z, H/x]`. A reduce-scatter
    over y sums the results and cuts them by rows.
    """

    def __init__(self, spec: EmbeddingSpec, state: CubeState, weight: Weight, padding: int | None = None) -> None:
        """`padding`: the entry that is not trained."""
        super().__init__()
        self.weight = weight.parameter
        self._gathered = weight
        self._name = spec.name
        self._gradients = state.gradients
        along_y = state.network.axis("y")
        self._first = along_y.index * int(spec.held(state.config) // along_y.size)
        self._padding = None if padding is None else padding - self._first
        self._cut = along_y.size > 1
        arranged = spec.arrangement(state.config)
        self._entries = spec.entries
        # torch checks indices of a whole vocabulary, but it would accept indices of padding.
        self._checked = self._cut or arranged is not None
        layouts = spec.found, spec.rests(state.config)
        self._sum = Collective.between(layouts, state.network, spec.name, {"rows": 0, "features": -1})

    def forward(self, tokens: Tensor) -> Tensor:
        if self._checked:
            check_indices(tokens, self._entries, f"{self._name}: token id")
        table = self._gathered.forward(self._name, backward_needs_it=False)
        ways = weave.place()[1]
        call = _Call(self._gathered, self._gradients, ways, self._cut, self._padding)
        rows = _Lookup.apply(self.weight, tokens - self._first if self._cut else tokens, table, call)
        self._gathered.read("forward", ways)
        return self._sum(rows)


class CubeTable(nn.Module):
    """Features over x; entries over y and z, or replicated if there are too few. Looked up for this rank's rows only."""

    def __init__(self, spec: TableSpec, state: CubeState, weight: Weight) -> None:
        super().__init__()
        self.weight = weight.parameter
        self._gathered = weight
        self._name = spec.name
        self._gradients = state.gradients
        self._rows = own_part(state.network.axis("y")) if state.config.sharded else None

    def forward(self, entries: Tensor) -> Tensor:
        if self._rows is not None:
            entries = self._rows(entries)
        table = self._gathered.forward(self._name, backward_needs_it=False)
        ways = weave.place()[1]
        rows = _Lookup.apply(self.weight, entries, table, _Call(self._gathered, self._gradients, ways))
        self._gathered.read("forward", ways)
        return rows


class TableWeight(Weight):
    """The weight of a table if all ranks of y have the same rows: each takes its part of the gradient and sums it over
    z.
    """

    def __init__(self, network: Network, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._part = own_part(network.axis("y"))
        self._shards = network.axis("z")

    def _scatter(self, gradient: Tensor) -> Pending:
        return self._shards.reduce_scatter(self._part(gradient), 0, f"{self._origin} weight gradient")


@dataclass(frozen=True)
class _Call:
    """One use of a table."""

    weight: Weight
    gradients: Gradients
    ways: int  # strands that use it
    cut: bool = False  # other ranks have the rest of its entries
    padding: int | None = None  # the entry that is not trained, among this rank's


class _Lookup(torch.autograd.Function):
    """Looks up rows of the table; zero for indices that are on other ranks. The parameter is passed for the autograd
    graph.
    """

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, index: Tensor, table: Tensor, call: _Call) -> Tensor:
        ctx.parameter, ctx.call, ctx.entries = parameter, call, table.shape[0]
        ctx.use = call.gradients.use(parameter)
        if not call.cut:
            ctx.save_for_backward(index)
            return functional.embedding(index, table)
        inside = (index >= 0) & (index < table.shape[0])
        safe = index.clamp(0, table.shape[0] - 1)
        ctx.save_for_backward(safe, ~inside.unsqueeze(-1))
        return functional.embedding(safe, table).masked_fill_(~inside.unsqueeze(-1), 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        index, *outside = ctx.saved_tensors
        call: _Call = ctx.call

        def product(into: Tensor | None, dtype: torch.dtype) -> Tensor:
            rows = gradient.masked_fill(outside[0], 0) if outside else gradient
            if call.padding is not None:
                rows = rows.masked_fill((index == call.padding).unsqueeze(-1), 0)
            # Not index_add_: on a GPU its order of additions varies, so replicas of a table would drift apart.
            wide = rows.to(call.gradients.dtype_of(ctx.parameter))
            return add_to(into, torch.ops.aten.embedding_dense_backward(wide, index, ctx.entries, -1, False))

        strands = call.ways if call.weight.sharded else 1
        wanted = WeightGradient(ctx.parameter, "lookup", product, call.weight.scatter, strands)
        call.gradients.weight_gradient(wanted)
        ctx.use.done()
        return None, None, None, None


@make_layer.register
def _(spec: EmbeddingSpec, making: Making) -> nn.Module:
    return CubeEmbedding(spec, making.state, making.weight(spec.name))


@make_layer.register
def _(spec: TableSpec, making: Making) -> nn.Module:
    state = making.state
    parameter = making.parameter("weight")
    assert parameter is not None
    if not spec.cut(state.config):
        weight = Weight(parameter, state.network.axis("z"), "replicated", state.prefetch_order, spec.name)
    else:
        make = Weight if state.config.sharded else partial(TableWeight, state.network)
        weight = make(parameter, state.network.axis("y", "z"), "freed", state.prefetch_order, spec.name)
    return CubeTable(spec, state, weight)
