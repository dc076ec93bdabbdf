"""Plans of models that nobody wrote a cut for: their lists of layers, the bytes of a step, and what is traced of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from commands import exit_code
from cubeloom import Grid, UserError
from cubeloom.base.files import write_sealed
from cubeloom.models import ModelSource, skeleton
from cubeloom.models.named import named
from cubeloom.parallel import Batch, ParallelConfig, ShardingPolicy
from cubeloom.parallel.specs import BetweenSpec, Call, TracedLinearSpec, WholeParameter, WholeSpec
from cubeloom.plan.model import Piece, derive_found
from cubeloom.plan.model.flops import flops
from cubeloom.plan.model.found import FoundModel, Traced, found_model, kept_file
from cubeloom.plan.model.model import PlaneOutput
from cubeloom.plan.model.shortened import shortened
from cubeloom.plan.search import Answer
from cubeloom.plan.search.found_cut import search_found
from cubeloom.tools.rehearse.plans import job_of

LAYERS, SEQUENCE = 5, 16
TRACED = ShardingPolicy(activations="replicated")


def config_of(kind: str) -> Any:
    sizes: Any = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    if kind == "gpt2":
        return transformers.GPT2Config(
            vocab_size=64,
            n_positions=32,
            n_embd=32,
            n_layer=LAYERS,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            architectures=["GPT2LMHeadModel"],
        )
    return transformers.Qwen3Config(
        vocab_size=64,
        max_position_embeddings=32,
        num_key_value_heads=4,
        head_dim=8,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
        **sizes,
    )


@pytest.fixture(scope="module", params=["qwen3", pytest.param("gpt2", marks=pytest.mark.long)])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("models") / request.param
    config_of(request.param).save_pretrained(folder)
    return named(str(folder))


@pytest.fixture(scope="module")
def found(source: ModelSource) -> FoundModel:
    return found_model(source.folder, "", lambda: source, SEQUENCE)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def answer(found: FoundModel) -> Answer:
    return search_found(found, "perlmutter", 8, 32, SEQUENCE)


@pytest.mark.slow
def test_bytes_are_those_of_the_stages_that_run(answer: Answer) -> None:
    """Exactly, for every worker of the plans that are shown and of some others that lie on their planes."""
    shown = {(plan.grid.x, plan.grid.y) for plan in answer.plans[:10]}
    checked = 0
    for plan in [*answer.plans[:4], *answer.plans[10::25]]:
        if (plan.grid.x, plan.grid.y) not in shown or plan.recompute:
            continue
        job = job_of(answer, plan)
        layout = job.laid_out()
        for worker in range(plan.grid.pipe):
            place = next(at for rank in range(8) if (at := job.grid.coordinates(rank))["pipe"] == worker)
            config = replace(ParallelConfig.exact(job.grid, job.rest, job.batch, 2, place), ways=plan.ways)
            theirs = layout.volume(config, worker, True)
            assert answer.bytes(plan, worker) == {axis: float(size) for axis, size in theirs.items()}, str(plan.grid)
            checked += 1
    assert checked >= 4


def test_flops_are_those_of_the_trace(found: FoundModel, source: ModelSource) -> None:
    model = skeleton(source)
    traced = source.cut(model).traced(model, Grid(), Batch(2, SEQUENCE))  # type: ignore[union-attr]
    assert flops(found.on(8), SEQUENCE) == pytest.approx(3 * traced.flops, rel=1e-9)


def test_no_plan_has_what_such_a_model_cannot_do(answer: Answer) -> None:
    assert answer.plans
    assert not any(plan.sharded or plan.regathered for plan in answer.plans)


def test_what_is_between_layers_is_cut_as_they_are(found: FoundModel) -> None:
    found.trace({(2, 2)})
    block = found.on(8).on(2, 2).kinds[1]
    (between,) = (layer for layer in block.layers if isinstance(layer, BetweenSpec))
    assert {axes for _, axes in between.multiplied} == {("x", "y")}  # attention by heads
    config = ParallelConfig.exact(Grid(x=2, y=2), TRACED, Batch(4, SEQUENCE), 2)
    alone = ParallelConfig.exact(Grid(), TRACED, Batch(4, SEQUENCE), 2)
    assert between.flops_here(config) == between.flops_here(alone) / 4 > 0


class OneLayer:
    """In the place of a tracer; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = list[tuple[int, int]]()
        self.traced = Traced(sequence=8, row=(0, 0), cuts={1: (2,), 2: (1, 2)})

    def pieces(self, x: int, y: int) -> tuple[Piece, ...]:
        self.asked.append((x, y))
        if x * y == 4:
            raise UserError("no")
        call = Call(4, 4, gradient=False)
        layer = TracedLinearSpec(
            name="a", k=4, n=4 * x * y, side="x", bias=True, calls=(call,), taken="both", given="one"
        )
        own = WholeSpec(name="b", kind="Own", why="", own=(WholeParameter("w", (3, 5), ("x",)),))
        between = BetweenSpec(name="c", multiplied=((1.5, ("x", "y")),), kept=((0.1, ()),))
        return (Piece(layers=(layer, own, between), outputs=(PlaneOutput(3.0, True, ("x",)),), losses=1),)


def test_what_was_traced_is_kept(cache: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}", encoding="utf-8")
    file, tracer = kept_file(config, 8), OneLayer()
    assert file.parent == cache and file == kept_file(config, 8) != kept_file(config, 16)
    first = FoundModel("one", lambda: tracer, file).on(8)
    assert tracer.asked == [(1, 1), (1, 2), (2, 1), (2, 2)]

    again = FoundModel("one", lambda: tracer, file)
    assert again.on(8) == first
    again.trace({(1, 2), (1, 8)})
    assert tracer.asked[4:] == [(1, 8)]
    assert FoundModel("one", lambda: tracer, file).on(8) == again.on(8) != first

    config.write_text('{"hidden_size": 8}', encoding="utf-8")
    assert kept_file(config, 8) != file


@pytest.mark.parametrize("damage", ["", "{}", "[]", "sealed"])
def test_what_is_damaged_is_traced_anew(tmp_path: Path, damage: str) -> None:
    file, again = tmp_path / "kept.json", OneLayer()
    made = FoundModel("one", OneLayer, file).on(2)
    if damage == "sealed":
        write_sealed(file, {"sequence": 8, "row": [0], "cuts": [[1, [1]]], "planes": [[1, 1, {"is": "os.system"}]]})
    else:
        file.write_text(damage, encoding="utf-8")
    assert FoundModel("one", lambda: again, file).on(2) == made
    assert len(again.asked) == 4


def test_a_cache_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert FoundModel("one", OneLayer, tmp_path / "file" / "kept.json").on(2).kinds


class Uneven(nn.Module):
    """Its blocks are of two kinds, in turns; the last two are looked up by number."""

    def __init__(self, by_number: bool) -> None:
        super().__init__()
        self.by_number = by_number
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=number % 2 == 0) for number in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(8) if self.by_number else range(len(self.blocks)):
            x = self.blocks[number](x)
        return x


def test_equal_blocks_are_traced_once() -> None:
    short = shortened(Uneven(by_number=False))
    assert len(short.model.blocks) == 4  # type: ignore[arg-type]
    assert short.blocks == {f"blocks.{n}": f"blocks.{n if n < 4 else 2 + n % 2}" for n in range(8)}
    assert len(Uneven(by_number=False).blocks) == 8


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "cubeloom" / "traced"


def test_the_command_plans_a_folder_and_writes_what_trains_it(
    source: ModelSource,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, settings = source.folder, tmp_path / "job.toml"  # type: ignore[attr-defined]
    asked = ["--cluster", "perlmutter", "--devices", "4", "--global-batch", "16", "--json", "-o", settings]
    assert exit_code("plan", "--model", folder, *asked) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["plans"][0]["step_s"] > 0 and told["plans"][0]["rest"].startswith("replicated")
    assert f'name = "{folder}"' in settings.read_text()
    # Once more nothing is traced.
    monkeypatch.setattr(derive_found, "ModelTracer", None)
    assert exit_code("plan", "--model", folder, *asked) == 0
    assert json.loads(capsys.readouterr().out)["plans"] == told["plans"]
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(tmp_path))
    again = ["--cluster", "perlmutter", "--json", f"--model.name={folder}"]
    assert exit_code("plan", settings, *again) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["grid"] == told["plans"][0]["grid"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere/at/all", "unknown model 'nowhere/at/all'"),
        ("{file}:build", "does not say how long a sequence may be: give --sequence"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, message: str
) -> None:
    (tmp_path / "net.py").write_text(NET)
    asked = ["--cluster", "perlmutter", "--devices", "4", "--global-batch", "16"]
    assert exit_code("plan", "--model", model.format(file=tmp_path / "net.py"), *asked) == 2
    assert message in capsys.readouterr().err


NET = """
from torch import nn


def build():
    return nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
"""
