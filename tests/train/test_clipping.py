"""The norm of all gradients is the serial model's on every grid and schedule, and has the same bits on all ranks; by it the
device decides what an optimizer does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, nan

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from cubeloom import Grid
from cubeloom.comm import Network, devices
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, LanguageConfig, LlamaConfig, build, cut_of
from cubeloom.parallel import Batch, apply, initial_values, materialise
from cubeloom.parallel.arranged import Lie
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.train import ShardedOptimizer
from cubeloom.train.adamw import AdamW
from cubeloom.train.clipping import GradShard, clip, norm_of, pieces, set_clip_and_skip
from cubeloom.train.job.settings import OptimizerSettings
from cubeloom.train.optimizers import build_optimizer
from on_a_gpu import NEEDS_GPU

pytestmark = pytest.mark.timeout(60)

MODEL = GPTConfig(vocab=64, positions=8, hidden=16, layers=2, heads=4)
# On y=4 ranks have copies of keys and values, and the last one padding.
COPIED = LlamaConfig(vocab=61, positions=8, hidden=16, layers=2, heads=8, kv_heads=2, mlp_hidden=16)
BATCH = Batch(8, 8)
TOKENS = torch.arange(64).view(8, 8)
MOST = 0.1


def serial(what: LanguageConfig) -> float:
    with torch.device("meta"):
        model = build(what)
    materialise(model, initial_values(model, 0, torch.float64))
    tokens = TOKENS % what.vocab
    model(tokens=tokens, targets=tokens).backward()
    return clip_grad_norm_(model.parameters(), MOST).item()


def norms(grid: Grid, schedule: str | None, zero: bool, what: LanguageConfig) -> tuple[float, float]:
    """Before clipping, and after."""
    network = Network(grid)
    with torch.device("meta"):
        model = build(what)
    fill = initial_values(model, 0, torch.float64)
    mine = network.share(TOKENS % what.vocab)
    if schedule is None:
        state = apply(model, cut_of(model), network, BATCH, fill)
        parameters, gradients, holders = dict(model.named_parameters()), state.gradients, None
        step: Callable[[], object] = partial(_step, model, mine)
    else:
        pipeline = Pipeline(model, cut_of(model), network, BATCH, fill, generate(schedule, grid.pipe, grid.pipe))
        parameters, gradients, holders = pipeline.parameters, pipeline.gradients, pipeline.layout.holders
        step = partial(pipeline.step, {"tokens": mine, "targets": mine})
    sharded = ShardedOptimizer(parameters.values(), gradients, torch.optim.AdamW) if zero else None
    step()
    found = pieces(parameters.items(), network, sharded, holders)
    return clip(found, network, MOST).item(), norm_of(found, network).item()


def _step(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    model(tokens=tokens, targets=tokens).backward()


@pytest.mark.parametrize(
    ("grid", "schedule", "zero", "what"),
    [
        pytest.param("x=2,y=2", None, False, MODEL, marks=pytest.mark.long),
        pytest.param("z=2,data=2", None, False, MODEL, marks=pytest.mark.long),
        ("z=2,data=2", None, True, MODEL),
        pytest.param("pipe=2,data=2", "chimera", False, MODEL, marks=pytest.mark.long),
        ("pipe=2,data=2", "chimera", True, MODEL),
        ("pipe=4", "1f1b", False, MODEL),
        pytest.param("y=4", None, False, COPIED, marks=pytest.mark.long),
        ("data=2,z=2,y=4", None, True, COPIED),
        ("pipe=2,y=4", "chimera", True, COPIED),
    ],
)
def test_the_norm_is_the_serial_model_s(
    ranks: RankPool, grid: str, schedule: str | None, zero: bool, what: LanguageConfig
) -> None:
    (whole,) = ranks.run(1, serial, what)
    on = Grid.parse(grid)
    found = ranks.run(on.world, norms, on, schedule, zero, what)
    assert len(set(found)) == 1
    before, after = found[0]
    assert before == pytest.approx(whole, rel=1e-12)
    assert after == pytest.approx(MOST, rel=1e-12)


Where = Callable[..., None]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def on(request: pytest.FixtureRequest) -> Where:
    """Calls something with a kind of device, on a rank that has one: kernels of a GPU are others."""

    def call(what: Callable[..., None], *arguments: object) -> None:
        pool = request.getfixturevalue("gpu_ranks")(4) if request.param == "cuda" else request.getfixturevalue("ranks")
        pool.run(1, what, *arguments, request.param)

    return call


def _divides_exactly(shape: tuple[int, ...], kind: devices.Kind) -> None:
    network = Network(Grid(), devices.current(kind))
    gradient = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) + 1).bfloat16().to(network.device)
    divided = gradient.clone()
    before = clip([GradShard(divided, 1)], network, MOST)
    assert torch.equal(divided, (gradient.double() / (before / MOST)).bfloat16())


@pytest.mark.parametrize("shape", [(), (7,), (5, 3)])
def test_what_has_few_digits_is_divided_by_a_number_with_many(on: Where, shape: tuple[int, ...]) -> None:
    on(_divides_exactly, shape)


KINDS = [
    OptimizerSettings(name="adamw"),
    OptimizerSettings(name="adamw", moments="bfloat16"),
    OptimizerSettings(name="sgd", momentum=0.9),
    OptimizerSettings(name="sgd", momentum=0.0),
]
TYPES = [torch.float64, torch.float32, torch.bfloat16]
# On a CPU torch's SGD does not update bfloat16 (issue 191763 of pytorch), and jobs that would need it are refused.
CASES = [
    (settings, dtype) for settings in KINDS for dtype in TYPES if (settings.name, dtype) != ("sgd", torch.bfloat16)
]


def _name(value: object) -> str:
    return (
        f"{value.name} {value.momentum} {value.moments or ''}".strip()
        if isinstance(value, OptimizerSettings)
        else str(value)
    )


class _Optimized:
    """A parameter and its optimizer, as a trainer makes it."""

    def __init__(self, settings: OptimizerSettings, dtype: torch.dtype, kind: devices.Kind) -> None:
        self.parameter = nn.Parameter(torch.linspace(-1, 1, 300, device=kind).to(dtype).view(3, 100))
        self._optimizer = build_optimizer(settings, [self.parameter])
        if isinstance(self._optimizer, AdamW):
            self._optimizer.locate(self.parameter, "weight", Lie((3, 100), (0, 0), ()))

    def step(self, gradient: torch.Tensor, size: float, most: float, limit: float) -> None:
        self.parameter.grad = gradient.to(self.parameter, copy=True)
        found = [GradShard(self.parameter.grad, 1)]
        set_clip_and_skip(
            self._optimizer, found, torch.tensor(size, dtype=torch.float64, device=gradient.device), most, limit
        )
        self._optimizer.step()

    def kept(self) -> dict[str, torch.Tensor]:
        return {"parameter": self.parameter.detach(), **self._optimizer.state[self.parameter]}


def _updates_with_clipped(settings: OptimizerSettings, dtype: torch.dtype, kind: devices.Kind) -> None:
    gradient = torch.linspace(-3, 5, 300, device=kind).to(dtype).view(3, 100)
    size = gradient.double().norm().item()
    bound, plain = _Optimized(settings, dtype, kind), _Optimized(settings, dtype, kind)
    for most, limit in [(MOST, inf), (0.0, inf), (2 * size, size)]:
        bound.step(gradient, size, most, limit)
        factor = min(1.0, most / size) if most else 1.0
        plain.step(gradient.double() * factor, size, 0.0, inf)
    close = 64 * torch.finfo(dtype).eps
    torch.testing.assert_close(bound.kept(), plain.kept(), rtol=close, atol=close)


@pytest.mark.parametrize(("settings", "dtype"), CASES, ids=_name)
def test_an_update_is_that_of_clipped_gradients(on: Where, settings: OptimizerSettings, dtype: torch.dtype) -> None:
    on(_updates_with_clipped, settings, dtype)


def _changes_nothing(
    settings: OptimizerSettings, dtype: torch.dtype, size: float, limit: float, kind: devices.Kind
) -> None:
    gradient = torch.full((3, 100), size, dtype=dtype, device=kind)
    small = torch.full((3, 100), 1 / 64, dtype=dtype, device=kind)
    tried, never = _Optimized(settings, dtype, kind), _Optimized(settings, dtype, kind)
    for _ in range(2):
        before = tried.parameter.detach().clone()
        tried.step(gradient, size, 1.0, limit)
        assert torch.equal(tried.parameter, before)
        for each in (tried, never):
            each.step(small, 0.1, 1.0, limit)
    torch.testing.assert_close(tried.kept(), never.kept(), rtol=0, atol=0)


@pytest.mark.parametrize(("size", "limit"), [(nan, 1e300), (inf, 1e300), (2.5, 2.0)])
@pytest.mark.parametrize(("settings", "dtype"), CASES, ids=_name)
def test_what_is_forbidden_changes_nothing(
    on: Where, settings: OptimizerSettings, dtype: torch.dtype, size: float, limit: float
) -> None:
    """Neither in the first step, where an optimizer makes its state, nor later."""
    on(_changes_nothing, settings, dtype, size, limit)
