"""Every number of ways trains as the serial model does, with the same bytes; the order of collectives, as literal strings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cubeloom import Grid, UserError
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import BERTConfig, Config, GPTConfig, LlamaConfig, OurModel, build, config, cut_of
from cubeloom.models.layers import MLP
from cubeloom.parallel import Batch, CubeState, ShardingPolicy, apply, initial_values
from cubeloom.parallel.parameter import local_of
from cubeloom.parallel.weave import Weave
from cubeloom.pipeline import generate
from cubeloom.tools.verify import Experiment
from grids import CUBES, RESTS, rest_is_long
from parity import holds
from serial_runs import Verified

pytestmark = pytest.mark.timeout(180)

SMALL: dict[str, Any] = {"vocab": 96, "positions": 16, "hidden": 32, "layers": 2, "heads": 4}
GPT = GPTConfig(**SMALL)
LLAMA = LlamaConfig(**SMALL, kv_heads=4, mlp_hidden=64)
BERT = BERTConfig(**SMALL, next_sentence=True)


def trains_as_serial(verified: Verified, model: Config, grid: str, ways: int, **changes: Any) -> None:
    changes = {"batch": Batch(8, 12), "steps": 2, **changes}
    holds(verified(Experiment(model=OurModel(model), grid=Grid.parse(grid), ways=ways, **changes)))


# Each two of grid, ways and rest mode together.
WOVEN = [
    ("x=2", 2, "sharded"),
    ("x=2", 4, "replicated"),
    ("y=2", 2, "replicated"),
    ("y=2", 4, "sharded"),
    ("z=2", 2, "sharded"),
    ("z=2", 4, "replicated"),
    ("x=2,y=2", 2, "replicated"),
    ("x=2,y=2", 4, "sharded"),
]


@pytest.mark.parametrize(
    ("grid", "ways", "activations"), rest_is_long(product(["x=2", "y=2", "z=2", "x=2,y=2"], [2, 4], RESTS), WOVEN)
)
def test_every_axis_and_both_rest_modes(verified: Verified, grid: str, ways: int, activations: Any) -> None:
    trains_as_serial(verified, GPT, grid, ways, rest=ShardingPolicy(activations=activations))


@pytest.mark.parametrize("model", [LLAMA, BERT], ids=["llama", "bert"])
def test_every_model_on_a_cube(verified: Verified, model: Config) -> None:
    trains_as_serial(verified, model, "x=2,y=2,z=2", 2)


@pytest.mark.parametrize(
    "rest",
    [ShardingPolicy(weights="kept"), ShardingPolicy(weights="replicated"), ShardingPolicy(inputs="regathered")],
    ids=["kept", "copy", "again"],
)
def test_operands_at_rest(verified: Verified, rest: ShardingPolicy) -> None:
    trains_as_serial(verified, GPT, "z=2,x=2", 2, rest=rest)


@pytest.mark.slow
def test_dropout_does_not_depend_on_the_number_of_ways(verified: Verified) -> None:
    for ways, grid in ((2, "data=2,y=2"), (4, "x=2")):
        trains_as_serial(verified, GPTConfig(**SMALL, dropout=0.2), grid, ways)


@pytest.mark.parametrize(
    ("name", "recompute"),
    rest_is_long(product(["1f1b", "chimera-zb"], [False, True]), [("1f1b", False), ("chimera-zb", True)]),
)
def test_in_a_pipeline(verified: Verified, name: str, recompute: bool) -> None:
    """Put-off weight gradients, recomputation and dropout with them."""
    model = GPTConfig(**SMALL, dropout=0.1)
    trains_as_serial(verified, model, "pipe=2,z=2", 2, schedule=generate(name, 2, 2), recompute=recompute)


@pytest.mark.long
@pytest.mark.parametrize("activations", ["sharded", "replicated"])
@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("grid", CUBES)
def test_every_cube(verified: Verified, grid: str, ways: int, activations: Any) -> None:
    on = Grid.parse(grid)
    rest = ShardingPolicy(activations=activations)
    trains_as_serial(verified, config("gpt-tiny"), grid, ways, batch=Batch(ways * on.z, 24), steps=3, rest=rest)


def test_a_batch_that_cannot_be_cut_into_strands_is_refused() -> None:
    for schedule in (None, generate("1f1b", 1, 2)):
        experiment = Experiment(model=OurModel(GPT), grid=Grid(), batch=Batch(6, 12), ways=4, schedule=schedule)
        with pytest.raises(UserError, match="of 6 samples cannot be cut into"):
            experiment.specs()


TOKENS = torch.arange(8 * 8).view(8, 8) % 32


def made(network: Network, activations: Any = "replicated", layers: int = 2) -> tuple[nn.Module, CubeState]:
    with torch.device("meta"):
        model = build(GPTConfig(vocab=32, positions=8, hidden=16, layers=layers, heads=4))
    fill = initial_values(model, 0, torch.float64)
    return model, apply(model, cut_of(model), network, Batch(2, 8), fill, ShardingPolicy(activations=activations))


def orders(activations: str, ways: int) -> tuple[str, str]:
    """Starts and waits of the blocks' collectives in each pass, numbered as they start."""
    network = Network(Grid(y=2))
    model, state = made(network, activations)
    woven = Weave(model, ways, state.staggers)
    found = []
    with network.timing() as forward:
        loss: Tensor = woven(tokens=TOKENS, targets=TOKENS)
    with network.timing() as backward:
        loss.backward()
    for journal in (forward, backward):
        order = [(what, each) for what, each in journal.order if "blocks" in each.entry.origin]
        numbers = {id(each): place for place, each in enumerate(each for what, each in order if what == "start")}
        found.append(" ".join(f"{'+' if what == 'start' else '-'}{numbers[id(each)]}" for what, each in order))
    return found[0], found[1]


def test_while_one_strand_waits_another_has_computed_and_started(ranks: RankPool) -> None:
    """All-reduces: in both passes a strand starts the next collective before anybody waits for the last one."""
    (forward, backward), other = ranks.run(2, orders, "replicated", 2)
    assert forward == "+0 +1 -0 +2 -1 +3 -2 +4 -3 +5 -4 +6 -5 +7 -6 -7"
    assert backward == "+0 +1 -0 +2 -1 +3 -2 +4 -3 +5 -4 +6 -5 +7 -7 -6"
    assert other == (forward, backward)  # all ranks start collectives in the same order


def test_gathers_and_scatters_that_follow_each_other_are_staggered(ranks: RankPool) -> None:
    (forward, backward), other = ranks.run(2, orders, "sharded", 2)
    assert (
        forward
        == "+0 -0 +1 +2 -1 -2 +3 +4 -3 -4 +5 +6 -5 -6 +7 +8 -7 -8 +9 +10 -9 -10 +11 +12 -11 -12 +13 +14 -13 -14 +15 -15"
    )
    assert backward == (
        "+0 -0 +1 +2 -1 -2 +3 +4 -3 -4 +5 +6 -5 -6 +7 +8 -7 -8 +9 +10 -9 -10 +11 +12 -11 -12 +13 +14 -13 -14 +15 -15"
    )
    assert other == (forward, backward)


def test_one_way_waits_for_each(ranks: RankPool) -> None:
    forward, backward = ranks.run(2, orders, "replicated", 1)[0]
    assert forward == backward == "+0 -0 +1 -1 +2 -2 +3 -3"


def stumble_in_the_second_strand(block: nn.Module, run: Callable[[], object]) -> None:
    calls: list[int] = []

    def stumble(*_: object) -> None:
        calls.append(0)
        if len(calls) == 2:
            raise ZeroDivisionError

    hook = block.register_forward_pre_hook(stumble)
    with pytest.raises(ZeroDivisionError):
        run()
    hook.remove()


def fails_then_trains() -> tuple[float, float]:
    """A forward in which a strand fails in the middle, then what the next step's gradients and bytes differ from others'."""
    network = Network(Grid(z=2, y=2))
    steps = []
    for disturbed in (False, True):
        model, state = made(network)
        step = partial(Weave(model, 2, state.staggers), tokens=TOKENS, targets=TOKENS)
        if disturbed:
            stumble_in_the_second_strand(model.get_submodule("blocks.1"), step)
        with network.recording() as ledger:
            step().backward()
        steps.append((ledger, [local_of(each.grad) for each in model.parameters() if each.grad is not None]))
    (plain_ledger, plain), (ledger, after) = steps
    worst = max((a - b).abs().max().item() for a, b in zip(plain, after, strict=True))
    return worst, float(sum(ledger.by_axis().values()) - sum(plain_ledger.by_axis().values()))


def test_after_a_failure_in_one_strand_the_next_step_is_exact(ranks: RankPool) -> None:
    assert ranks.run(4, fails_then_trains) == [(0.0, 0.0)] * 4


def checkpointed_by_torch() -> None:
    network = Network(Grid(y=2))
    with torch.device("meta"):
        model = build(GPTConfig(vocab=32, positions=8, hidden=16, layers=2, heads=4, dropout=0.5))
    state = apply(model, cut_of(model), network, Batch(2, 8), initial_values(model, 0, torch.float64))
    state.clock.step = 0
    block = model.get_submodule("blocks.0")
    plain = block.forward
    block.forward = lambda x, sequence: checkpoint(plain, x, sequence, use_reentrant=False)
    Weave(model, 2, state.staggers)(tokens=TOKENS[:4], targets=TOKENS[:4]).backward()


def test_dropout_refuses_to_guess_its_strand_in_a_recomputation(ranks: RankPool) -> None:
    with pytest.raises(UserError, match=r"use `cubeloom.parallel.weave.recompute` in place of torch's checkpoint"):
        ranks.run(2, checkpointed_by_torch)


def in_autocast(ways: int, compiled: bool) -> tuple[float, float]:
    """Loss and norm of the gradients of a float32 model in bfloat16 autocast, each block's MLP compiled between collectives."""
    network = Network(Grid(y=2))
    with torch.device("meta"):
        model = build(GPTConfig(vocab=32, positions=8, hidden=16, layers=2, heads=4))
    state = apply(model, cut_of(model), network, Batch(2, 8), initial_values(model, 0, torch.float32))
    if compiled:
        for mlp in [module for module in model.modules() if isinstance(module, MLP)]:
            mlp.act = torch.compile(mlp.act, backend="aot_eager")  # type: ignore[assignment]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = Weave(model, ways, state.staggers)(tokens=TOKENS, targets=TOKENS)
    loss.backward()
    norm = sum(local_of(each.grad).square().sum().item() for each in model.parameters() if each.grad is not None)
    return loss.item(), norm**0.5


@pytest.mark.slow
def test_bfloat16_autocast_and_compiled_pieces(ranks: RankPool) -> None:
    serial = ranks.run(2, in_autocast, 1, False)[0]
    for ways, compiled in ((2, False), (2, True)):
        assert ranks.run(2, in_autocast, ways, compiled)[0] == pytest.approx(serial, rel=2e-2)
