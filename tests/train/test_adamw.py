"""Moments in bfloat16 that are rounded stochastically: unbiased, the same on every grid, and good enough to train."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from jobs import MODEL, job
from torch import Tensor, nn
from whole import tensors

from cubeloom import Grid
from cubeloom.base import counter
from cubeloom.base.errors import UserError
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, OurModel
from cubeloom.parallel import Batch
from cubeloom.parallel.arranged import Lie
from cubeloom.parallel.arrangement import Run
from cubeloom.pipeline import generate
from cubeloom.tools.verify import Experiment
from cubeloom.train import adamw_update
from cubeloom.train.adamw import MOMENTS, AdamW, index_of
from cubeloom.train.job import Job
from cubeloom.train.job.settings import CheckpointSettings, DataSettings, OptimizerSettings, RateSettings, Source
from cubeloom.train.loop import train
from cubeloom.train.trainer import Trainer
from grids import rest_is_long
from parity import holds
from serial_runs import Verified

POEM = Path(__file__).parents[2] / "examples" / "tyger.txt"
BF16 = OptimizerSettings(moments="bfloat16")
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def lying(shape: tuple[int, ...], rows: slice = slice(None)) -> Lie:
    first, last, _ = rows.indices(shape[0])
    return Lie(shape, (first, *(0 for _ in shape[1:])), (Run(0, last - first, first),))


def optimizer(values: Tensor, rows: slice = slice(None), name: str = "weight", **options: object) -> AdamW:
    """Of some rows of a tensor with these values."""
    parameter = nn.Parameter(values[rows].clone())
    made = AdamW([parameter], **(OPTIONS | options))  # type: ignore[arg-type]
    made.locate(parameter, name, lying(tuple(values.shape), rows))
    return made


def only(of: torch.optim.Optimizer) -> nn.Parameter:
    parameter: nn.Parameter = of.param_groups[0]["params"][0]
    return parameter


def stepped(of: torch.optim.Optimizer, gradients: list[Tensor]) -> dict[str, Tensor]:
    for gradient in gradients:
        only(of).grad = gradient.to(only(of).dtype)
        of.step()
    return {"weight": only(of).detach(), **of.state[only(of)]}


def drawn(shape: tuple[int, ...], key: int) -> Tensor:
    return counter.normal(key, shape, (0,) * len(shape), shape).float()


def gradients(shape: tuple[int, ...], steps: int) -> list[Tensor]:
    return [drawn(shape, 100 + step) for step in range(steps)]


def test_many_roundings_have_the_value_as_their_mean() -> None:
    value = 1 + 2**-7 * 0.3  # between two neighbours in bfloat16
    random = counter.bits(5, torch.arange(200_000))
    found = counter.rounded(torch.full((200_000,), value), random)
    assert set(found.tolist()) == {1.0, 1 + 2**-7}
    error = 2**-7 * math.sqrt(0.3 * 0.7 / 200_000)
    assert abs(found.double().mean().item() - value) < 4 * error


def test_what_bfloat16_has_stays_as_it_is() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-130, math.inf, -math.inf])
    every = torch.arange(0, 1 << 16, 257)
    assert all(torch.equal(counter.rounded(values, random.expand(7)).float(), values) for random in every)
    nan = torch.tensor([0x7FFFFFFF, -1]).to(torch.int32).view(torch.float32)
    assert counter.rounded(nan, torch.full((2,), 0xFFFF)).isnan().all()


def test_a_small_constant_gradient_is_not_lost() -> None:
    """After a large gradient the second moment falls. Each change is below half a unit of bfloat16: rounded to the nearest
    it stalls."""
    shape, steps, tiny = (64, 64), 1500, 1e-3
    found = optimizer(torch.zeros(shape), betas=(0.9, 0.999))
    first = [torch.ones(shape)]
    stepped(found, first)
    stalled = found.state[only(found)]["exp_avg_sq"].clone()
    stochastic = stepped(found, [torch.full(shape, tiny)] * steps)["exp_avg_sq"].double()
    for _ in range(steps):
        stalled = (stalled.float() * 0.999 + tiny**2 * 0.001).bfloat16()
    exact = 0.001 * 0.999**steps + tiny**2 * (1 - 0.999**steps)
    assert stochastic.mean().item() == pytest.approx(exact, rel=0.01)
    assert stalled.double().mean().item() > 2 * exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_update_is_torch_s_but_for_the_rounding_of_moments(dtype: torch.dtype) -> None:
    values, some = drawn((40, 50), 1).to(dtype), gradients((40, 50), 1)
    parameter = nn.Parameter(values.clone())
    theirs = stepped(torch.optim.AdamW([parameter], fused=True, **OPTIONS), some)  # type: ignore[arg-type]
    mine = stepped(optimizer(values), some)
    torch.testing.assert_close(mine["weight"], theirs["weight"], rtol=1e-6, atol=1e-7)
    for name in MOMENTS:
        assert mine[name].dtype == torch.bfloat16
        torch.testing.assert_close(mine[name].to(dtype), theirs[name], rtol=2**-7, atol=0)


def test_weights_of_bfloat16_are_rounded_stochastically_too() -> None:
    """A step is a thousandth of a unit: some weights take a whole one."""
    mine = optimizer(torch.ones(300, 300).bfloat16(), lr=1e-5, weight_decay=0.0)
    after = stepped(mine, [torch.ones(300, 300)] * 10)["weight"].double()
    assert after.mean().item() == pytest.approx(1 - 1e-4, abs=3e-5)


@pytest.mark.parametrize("shape", [(300, 7), (70000,), (4, 3, 2, 2), (3, 100_000)])
def test_a_part_is_rounded_as_the_whole(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    values, some, rows = drawn(shape, 1), gradients(shape, 3), slice(1, max(2, shape[0] // 2))
    whole = stepped(optimizer(values), some)
    monkeypatch.setattr(adamw_update, "_BLOCK", 1000)
    part = stepped(optimizer(values, rows), [each[rows] for each in some])
    for name, tensor in part.items():
        assert torch.equal(tensor, whole[name] if name == "step" else whole[name][rows]), name


def test_another_name_and_another_step_are_rounded_otherwise() -> None:
    values, (gradient, _) = drawn((30, 30), 1), gradients((30, 30), 2)
    first = stepped(optimizer(values), [gradient])["exp_avg"]
    assert torch.equal(first, stepped(optimizer(values), [gradient])["exp_avg"])
    assert not torch.equal(first, stepped(optimizer(values, name="other"), [gradient])["exp_avg"])
    later = optimizer(values)
    stepped(later, [torch.zeros_like(gradient), gradient])
    assert not torch.equal(first, later.state[only(later)]["exp_avg"])


def test_arranged_rows_have_their_index_in_the_whole() -> None:
    runs = (Run(0, 2, 6), Run(2, 1, None), Run(3, 2, 0))
    for dim, whole, shape in ((0, (8, 3), (5, 3)), (1, (3, 8), (3, 5))):
        rows, columns = index_of(Lie(whole, (0, 0), runs, dim), torch.Size(shape), torch.device("cpu"))
        every = torch.arange(24).view(whole).index_select(dim, torch.tensor([6, 7, 0, 0, 1]))
        assert torch.equal(rows[:, None] + columns, every)


def test_a_state_is_saved_and_loaded() -> None:
    values, some = drawn((30, 30), 1), gradients((30, 30), 4)
    never_stopped, first = stepped(optimizer(values), some), optimizer(values)
    between = stepped(first, some[:2])["weight"]
    second = optimizer(between)
    second.load_state_dict(first.state_dict())
    goes_on = stepped(second, some[2:])
    assert all(torch.equal(goes_on[name], tensor) for name, tensor in never_stopped.items())
    theirs = torch.optim.AdamW([nn.Parameter(values.clone())], **OPTIONS)  # type: ignore[arg-type]
    wide = stepped(theirs, some[:2])["exp_avg"]
    second.load_state_dict(theirs.state_dict())
    assert torch.equal(second.state[only(second)]["exp_avg"], wide.bfloat16())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler itself imports
@pytest.mark.parametrize("kernels", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_s_code_computes_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kernels: bool) -> None:
    """Its kernels may fuse a product with a sum."""
    if not kernels:  # making them takes half a minute
        monkeypatch.setattr(adamw_update, "compiled", lambda: adamw_update.update_group)
    values, some = drawn((20, 30), 1).to(dtype), gradients((20, 30), 1)
    mine, plain = optimizer(values), stepped(optimizer(values), some)
    stepped(mine, [torch.zeros(20, 30)])  # makes the state
    only(mine).data.copy_(values)
    state, place = mine.state[only(mine)], mine._places[only(mine)]
    tensors = [only(mine).detach(), some[0].to(dtype), *(state[name] for name in MOMENTS), place.rows, place.columns]
    flat = adamw_update._flattened(*([each] for each in tensors))
    for forbidden in (1.0, 0.0):
        before = [each.clone() for each in tensors]
        adamw_update._on_a_gpu(
            flat,
            [place.key],
            torch.ones(1),
            adamw_update.Hyper(1e-2, 0.9, 0.95, 1e-8, 0.1),
            None,
            torch.tensor(forbidden),
        )
        assert not forbidden or all(map(torch.equal, tensors, before))
    for name, tensor in (("weight", tensors[0]), *((name, state[name]) for name in MOMENTS)):
        differ = tensor != plain[name]
        assert differ.float().mean() < 0.01, name  # a last bit of float32 seldom changes a rounding
        torch.testing.assert_close(tensor, plain[name], rtol=2**-6, atol=1e-6)


def test_it_is_refused_where_there_are_no_moments() -> None:
    with pytest.raises(UserError, match=r'optimizer\.moments = "bfloat16" is for optimizer\.name = "adamw"'):
        OptimizerSettings(name="sgd", moments="bfloat16")


def begin(what: Job, steps: int) -> None:
    trainer = Trainer(what, Network(what.grid))
    for _ in range(steps):
        trainer.step()
    trainer.save()
    trainer.close()


def checkpoint_of(ranks: RankPool, made: Job) -> dict[str, Tensor]:
    ranks.run(made.grid.world, train, made, timeout=100)
    return tensors(made.checkpoints)


def close(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Of float64: gradients differ in their last bits only, which changes no rounding. Those of attention keys' biases are
    zero but for such bits."""
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if tensor.dtype == torch.bfloat16:
            torch.testing.assert_close(mine[name], tensor, rtol=0, atol=1e-15)
        else:
            torch.testing.assert_close(mine[name], tensor, rtol=1e-9, atol=1e-9)


GRIDS = [("data=2,z=2", "1f1b", True), ("pipe=2,x=2", "chimera", True), ("y=2", "1f1b", False)]


@pytest.mark.slow
@pytest.mark.parametrize(("grid", "schedule", "zero"), rest_is_long(GRIDS, GRIDS[1:2]))
def test_every_grid_and_every_restart_rounds_alike(
    ranks: RankPool, tmp_path: Path, grid: str, schedule: str, zero: bool
) -> None:
    more: dict[str, Any] = {"optimizer": BF16, "checkpoint": CheckpointSettings(every=3, keep=9)}
    serial = checkpoint_of(ranks, job(tmp_path / "one", microbatches=1, **more))
    assert {tensor.dtype for name, tensor in serial.items() if "exp_avg" in name} == {torch.bfloat16}
    changed = more | {"optimizer": replace(BF16, shard_optimizer_state=zero)}
    made = job(tmp_path / grid, grid, schedule, 2, **changed)
    ranks.run(made.grid.world, begin, made, 3, timeout=100)
    close(checkpoint_of(ranks, replace(made, grid=job(tmp_path, "x=2,y=2").grid)), serial)


def test_it_trains_as_the_serial_model_does(verified: Verified) -> None:
    """Which rounds alike."""
    model = OurModel(GPTConfig(vocab=32, positions=8, hidden=16, layers=2, heads=2, tied=True))
    schedule = generate("chimera", 2, 2)
    made = Experiment(model=model, grid=Grid(pipe=2), batch=Batch(4, 8), schedule=schedule, moments="bfloat16")
    report = verified(made)
    holds(report)
    other = verified(replace(made, moments=None))
    assert report.serial_losses[-1] != other.serial_losses[-1]


@pytest.mark.parametrize(("first", "second"), [(None, "bfloat16"), ("bfloat16", None)])
def test_a_run_goes_on_with_other_moments(
    ranks: RankPool, tmp_path: Path, first: str | None, second: str | None
) -> None:
    def settings(moments: str | None) -> OptimizerSettings:
        return OptimizerSettings(moments=moments)  # type: ignore[arg-type]

    made = job(tmp_path, steps=2, optimizer=settings(first))
    before = checkpoint_of(ranks, made)
    kept = {each.dtype for name, each in before.items() if "exp_avg" in name}
    assert kept == {torch.bfloat16 if first else torch.float64}
    after = checkpoint_of(ranks, replace(made, steps=4, optimizer=settings(second)))
    assert {each.dtype for name, each in after.items() if "exp_avg" in name} != kept


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_small_model_learns_as_with_moments_of_float32(ranks: RankPool, tmp_path: Path) -> None:
    """After 200 steps the loss lies within three standard deviations of four seeds."""

    def loss(seed: int, settings: OptimizerSettings) -> float:
        made = job(
            tmp_path / f"{seed}{settings.moments}",
            microbatches=1,
            steps=200,
            seed=seed,
            dtype="float32",
            model=replace(MODEL, vocab=None, positions=32, hidden=32, dropout=0.0),
            data=DataSettings(sources=(Source(stream=str(POEM)),)),
            batch=Batch(4, 32),
            optimizer=settings,
            rate=RateSettings(peak=3e-3, warmup=20),
        )
        (ended,) = ranks.run(1, train, made, timeout=200)
        assert ended.loss is not None
        return float(ended.loss)

    usual = [loss(seed, OptimizerSettings()) for seed in range(4)]
    found = [loss(seed, BF16) for seed in range(2)]
    (tmp_path / "losses.txt").write_text(str((usual, found)))
    assert mean(usual) < 2  # of 5.8: it learns
    assert abs(mean(found) - mean(usual)) < 3 * stdev(usual) and max(found) < max(usual) + 3 * stdev(usual)
