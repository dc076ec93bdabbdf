"""What happens when in a backward: overlap, prefetching, putting off, accumulation."""

from __future__ import annotations

import gc
import time
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cubeloom import Grid
from cubeloom.comm import Axis, Network, Pending
from cubeloom.launch import RankPool
from cubeloom.models import build, config, cut_of
from cubeloom.parallel import Batch, CubeState, ShardingPolicy, apply, initial_values
from cubeloom.parallel.gradients import WeightGradient
from cubeloom.parallel.parameter import local_of

BATCH = Batch(4, 24)


def cut_model(grid: Grid, **rest: Any) -> tuple[nn.Module, CubeState, Network]:
    network = Network(grid)
    with torch.device("meta"):
        plain = build(config("gpt-tiny"))
    state = apply(plain, cut_of(plain), network, BATCH, initial_values(plain, 0, torch.float64), ShardingPolicy(**rest))
    return plain, state, network


def batch_of(network: Network, part: slice = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.arange(BATCH.samples * BATCH.sequence).view(BATCH.samples, -1) * 7 % 384
    size = BATCH.samples // network.grid.z
    mine = tokens[network.coordinates["z"] * size :][:size][part]
    return mine, mine.roll(-1, 1)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: local_of(each.grad).clone() for name, each in model.named_parameters() if each.grad is not None}


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(((first[name] - second[name]).abs().max() / first[name].abs().max()).item() for name in first)


class Logged(Pending):
    """Says when it is awaited."""

    def __init__(self, pending: Pending, log: list[str], origin: str) -> None:
        self._inner, self._log, self._origin = pending, log, origin

    def wait(self) -> torch.Tensor:
        self._log.append(f"await {self._origin}")
        return self._inner.wait()


def events_of_backward(grid: Grid, rest: dict[str, str], layer: str) -> list[str]:
    """Starts and ends of a layer's collectives, and its weight gradient's matmul, in the second step's backward."""
    model, state, network = cut_model(grid, **rest)
    log: list[str] = []

    def spy(axis: Any, name: str, position: int) -> None:
        original = getattr(axis, name)

        def logged(*arguments: Any, **options: Any) -> Pending:
            origin = str(options.get("origin", arguments[position] if len(arguments) > position else ""))
            if not origin.startswith(layer):
                return original(*arguments, **options)
            log.append(f"start {origin}")
            return Logged(original(*arguments, **options), log, origin)

        setattr(axis, name, logged)

    for name in ("x", "y", "z"):
        if grid.size(name) > 1:
            for operation, position in (("all_gather", 2), ("reduce_scatter", 2), ("all_reduce_in_place", 1)):
                spy(network.axis(name), operation, position)
    target = getattr(model.get_submodule(layer), "weight", None)
    compute_now = state.gradients.weight_gradient

    def weight_gradient(wanted: WeightGradient) -> None:
        if wanted.parameter is target:
            log.append("weight gradient")
        compute_now(wanted)

    state.gradients.weight_gradient = weight_gradient  # type: ignore[method-assign]
    for _ in range(2):
        loss = model(*batch_of(network))
        log.clear()
        loss.backward()
    return log


def test_the_input_gradient_travels_behind_the_weight_gradient(ranks: RankPool) -> None:
    """Sharded: gather dY; start the scatter of dX; compute dW; only then await dX."""
    log = ranks.run(4, events_of_backward, Grid(x=2, y=2), {}, "blocks.0.mlp.up")[0]
    assert log == [
        "start blocks.0.mlp.up output backward",
        "await blocks.0.mlp.up output backward",
        "start blocks.0.mlp.up input backward",
        "weight gradient",
        "await blocks.0.mlp.up input backward",
    ]


def test_so_does_a_replicated_input_s_all_reduce(ranks: RankPool) -> None:
    log = ranks.run(2, events_of_backward, Grid(y=2), {"activations": "replicated"}, "blocks.0.mlp.up")[0]
    assert log == [
        "start blocks.0.mlp.up input backward",
        "weight gradient",
        "await blocks.0.mlp.up input backward",
    ]


def test_a_freed_weight_is_gathered_ahead_and_its_gradient_scattered_behind_the_layer_before(ranks: RankPool) -> None:
    log = ranks.run(2, events_of_backward, Grid(z=2), {}, "blocks.0.mlp")[0]
    assert log == [
        "start blocks.0.mlp.down weight backward",  # while blocks.1 computes
        "await blocks.0.mlp.down weight backward",
        "start blocks.0.mlp.up weight backward",
        "start blocks.0.mlp.down weight gradient",
        "await blocks.0.mlp.up weight backward",
        "start blocks.0.mlp.up weight gradient",
        "await blocks.0.mlp.down weight gradient",
        "await blocks.0.mlp.up weight gradient",
    ]


def forward_gathers(grid: Grid) -> list[str]:
    model, _, network = cut_model(grid)
    model(*batch_of(network))
    with network.recording() as ledger:
        model(*batch_of(network))
    return [entry.origin for entry in ledger.entries if entry.origin.startswith("blocks.0.")]


def test_the_next_weight_is_gathered_before_this_layer_is_done(ranks: RankPool) -> None:
    """From the second forward on, when the order of the layers is known."""
    started = ranks.run(4, forward_gathers, Grid(x=2, z=2))[0]
    layers = ["attention.qkv", "attention.proj", "mlp.up", "mlp.down"]
    for this, following in pairwise(layers):
        ahead = started.index(f"blocks.0.{following} weight forward")
        output = [place for place, origin in enumerate(started) if origin.startswith(f"blocks.0.{this} output")]
        assert not output or ahead < output[0]


def put_off(grid: Grid) -> tuple[float, set[str], int, int]:
    model, state, network = cut_model(grid)
    model(*batch_of(network)).backward()
    at_once = gradients_of(model)
    model.zero_grad()
    with state.gradients.defer_weight_grads() as noted:
        model(*batch_of(network)).backward()
    sums = state.gradients.sums()
    early, count = {name for name, each in model.named_parameters() if each in sums}, len(noted)
    state.gradients.run_deferred(noted)
    state.gradients.reduce()
    return largest_difference(at_once, gradients_of(model)), early, count, len(noted)


def test_weight_gradients_can_be_put_off_and_drained_later(ranks: RankPool) -> None:
    for difference, early, noted, left in ranks.run(8, put_off, Grid(x=2, y=2, z=2)):
        assert difference < 1e-12
        assert early and not {name for name in early if name.endswith("weight") and "norm" not in name}
        assert noted == 2 * 4 + 3  # the linears of two blocks, the head, tokens and positions
        assert left == 0


def accumulate(grid: Grid) -> tuple[float, float]:
    """Two halves of a batch against the whole: summed at the end only, and summed in each pass."""
    model, state, network = cut_model(grid)
    model(*batch_of(network)).backward()
    whole = gradients_of(model)
    halves = [slice(0, 1), slice(1, 2)]
    model.zero_grad()
    with state.gradients.accumulating():
        (model(*batch_of(network, halves[0])) / 2).backward()
    (model(*batch_of(network, halves[1])) / 2).backward()
    late = largest_difference(whole, gradients_of(model))
    model.zero_grad()
    for half in halves:
        (model(*batch_of(network, half)) / 2).backward()
    return late, largest_difference(whole, gradients_of(model))


def test_gradients_of_several_passes_add_up(ranks: RankPool) -> None:
    for late, each in ranks.run(4, accumulate, Grid(z=2, x=2)):
        assert late < 1e-12
        assert each < 1e-12


def recompute(grid: Grid) -> tuple[float, bool]:
    """Whole blocks recomputed in the backward."""
    model, _, network = cut_model(grid)
    model(*batch_of(network)).backward()
    plain = gradients_of(model)
    model.zero_grad()
    for block in model.blocks:  # type: ignore[union-attr]
        inner = block.forward

        def again(x: torch.Tensor, sequence: int, inner: Any = inner) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(inner, x, sequence, use_reentrant=False)

        block.forward = again
    with network.recording() as ledger:
        model(*batch_of(network)).backward()
    return largest_difference(plain, gradients_of(model)), bool(ledger.entries)


def test_blocks_can_be_recomputed(ranks: RankPool) -> None:
    for difference, recorded in ranks.run(8, recompute, Grid(x=2, y=2, z=2)):
        assert difference < 1e-12
        assert recorded


def small_buckets(grid: Grid) -> tuple[float, int, int]:
    """The same gradients, whatever the size of the buckets."""
    model, state, network = cut_model(grid)
    counts = []
    found = []
    for limit in (2**30, 1):
        model.zero_grad()
        state.gradients.buckets.limit = limit
        with network.recording() as ledger:
            model(*batch_of(network)).backward()
        counts.append(sum(entry.origin == "gradients" for entry in ledger.entries))
        found.append(gradients_of(model))
    return largest_difference(*found), counts[0], counts[1]


def test_gradients_are_summed_in_buckets(ranks: RankPool) -> None:
    """All that replicas over data sum fits one bucket; with the smallest, each parameter goes alone."""
    for difference, few, many in ranks.run(2, small_buckets, Grid(data=2)):
        assert difference == 0
        assert few == 1
        assert many == 2 + 2 * 12 + 2  # tables, two blocks of twelve, the last norm


def leftovers(grid: Grid) -> tuple[int, int]:
    """Tensors alive after two steps and after four."""
    model, _, network = cut_model(grid)
    counts = []
    for _ in range(2):
        for _ in range(2):
            model(*batch_of(network)).backward()
            model.zero_grad()
        counts.append(tensors_alive(network))
    return counts[0], counts[1]


def tensors_alive(network: Network) -> int:
    """Once gloo's threads have let go of what they sent last, a moment after it was awaited."""
    network.barrier()
    time.sleep(0.1)
    gc.collect()
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


def test_a_step_leaves_nothing_behind(ranks: RankPool) -> None:
    for after_two, after_four in ranks.run(4, leftovers, Grid(x=2, z=2)):
        assert after_two == after_four


def what_a_step_asks_for() -> tuple[list[str], int]:
    """The sums that are not written over their summands, and how many tensors were distributed, in the second step."""
    model, _, network = cut_model(Grid(y=2), activations="replicated")
    model(*batch_of(network)).backward()
    with (
        patch.object(Axis, "all_reduce", autospec=True, side_effect=Axis.all_reduce) as copied,
        patch.object(DTensor, "from_local", side_effect=DTensor.from_local) as distributed,
    ):
        model.zero_grad()
        model(*batch_of(network)).backward()
    return [str(call.args[2]) for call in copied.call_args_list], distributed.call_count


def test_a_step_copies_no_summand_of_a_layer_and_distributes_nothing_anew(ranks: RankPool) -> None:
    copied, distributed = ranks.run(2, what_a_step_asks_for)[0]
    assert copied and not any("blocks." in origin for origin in copied)
    assert distributed == 0
