"""Models that nobody wrote a cut for, from a settings file: trained, gone on with on another grid, sampled, exported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from commands import exit_code
from cubeloom import Grid, UserError
from cubeloom.launch import RankPool
from cubeloom.parallel import Batch
from cubeloom.tools.convert import convert
from cubeloom.train.checkpoint import newest, read_manifest
from cubeloom.train.data import Request, prepare
from cubeloom.train.data.random_tokens import RandomTokens
from cubeloom.train.job import Job, check
from cubeloom.train.job.settings import (
    CheckpointSettings,
    DataSettings,
    LayoutSettings,
    ModelSettings,
    RateSettings,
    Source,
)
from cubeloom.train.loop import train
from cubeloom.train.metrics.log import NAME, read_log

NANO = Path(__file__).parents[2] / "examples" / "nano_gpt.py"
VOCABULARY, SEQUENCE, STEPS = 260, 8, 4
Theirs = Any  # transformers has no types


def qwen(vocabulary: int = VOCABULARY) -> Theirs:
    """With weights that are tied and norms of heads: our own Llama has neither."""
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=vocabulary,
            max_position_embeddings=16,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=4,
            tie_word_embeddings=True,
            architectures=["Qwen3ForCausalLM"],
        )
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With weights."""
    made = tmp_path_factory.mktemp("hugging") / "qwen"
    torch.manual_seed(3)
    qwen().double().save_pretrained(made)
    return made


def job_of(run: Path, called: str, **changes: Any) -> Job:
    made = Job(
        folder=run,
        steps=STEPS,
        dtype="float64",
        patience=60,
        model=ModelSettings(name=called),
        batch=Batch(8, SEQUENCE),
        rate=RateSettings(peak=1e-2, warmup=2),
        checkpoint=CheckpointSettings(every=2),
    )
    return replace(made, **changes)


def losses(run: Path) -> list[float]:
    return [record.loss for record in read_log(run / NAME).records]


def trained_plainly(model: Theirs, job: Job) -> list[float]:
    """As a loop of one's own has it; the model shifts its labels itself."""
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    found = []
    for step in range(job.steps):
        for group in optimizer.param_groups:
            group["lr"] = job.learning_rate(step)
        numbers = torch.arange(step * 8, step * 8 + 8)
        tokens = RandomTokens(VOCABULARY, SEQUENCE).samples(numbers)[:, :-1]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.fixture(scope="module")
def run(folder: Path, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Begun on z=4, gone on with on pipe=2,y=2."""
    made = tmp_path_factory.mktemp("runs") / "run"
    ranks.run(
        4, train, job_of(made, str(folder), steps=2, rate=RateSettings(peak=1e-2, decay="constant"), grid=Grid(z=4))
    )
    later = job_of(made, str(folder), rate=RateSettings(peak=1e-2, decay="constant"), grid=Grid(pipe=2, y=2))
    ranks.run(4, train, later)
    return made


@pytest.mark.slow
def test_a_folder_trains_from_its_weights_as_a_plain_loop_does(run: Path, folder: Path) -> None:
    """On two grids, the second going on where the first stopped."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    job = job_of(run, str(folder), rate=RateSettings(peak=1e-2, decay="constant"))
    with torch.random.fork_rng():
        expected = trained_plainly(model, job)
    # Theirs computes norms and its loss in float32.
    assert losses(run) == pytest.approx(expected, rel=1e-5)
    assert len(set(expected)) == STEPS


@pytest.mark.slow
def test_its_export_is_what_transformers_loads_to_the_bit(run: Path, folder: Path, tmp_path: Path) -> None:
    done = convert(run, tmp_path / "out")
    assert done.model["config"]["architectures"] == ["Qwen3ForCausalLM"]
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert isinstance(back, transformers.Qwen3ForCausalLM) and back.dtype == torch.float64
    convert(tmp_path / "out", tmp_path / "imported")
    convert(tmp_path / "imported", tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    before = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    same = {name: torch.equal(each, again.state_dict()[name]) for name, each in back.state_dict().items()}
    assert all(same.values()) and "lm_head.weight" in same
    assert not torch.equal(before.lm_head.weight, back.lm_head.weight)
    tokens = torch.arange(6).view(1, 6)
    assert torch.equal(back(tokens).logits, again(tokens).logits)


def test_its_checkpoints_say_what_it_is(run: Path) -> None:
    checkpoint = newest(run)
    assert checkpoint is not None
    said = read_manifest(checkpoint)["progress"]["model"]
    assert said["family"] == "hugging_face" and said["config"]["model_type"] == "qwen3"


@pytest.mark.slow
def test_a_run_may_start_from_a_checkpoint_instead_of_the_folder(
    run: Path, folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    start = ModelSettings(name=str(folder), start=run)
    (ended,) = ranks.run(
        1, train, job_of(tmp_path / "next", str(folder), model=start, steps=1, rate=RateSettings(peak=1e-2))
    )
    (plain,) = ranks.run(1, train, job_of(tmp_path / "plain", str(folder), steps=1, rate=RateSettings(peak=1e-2)))
    assert plain.loss == pytest.approx(losses(run)[0], rel=1e-9)
    assert ended.loss != pytest.approx(plain.loss, rel=1e-6)


@pytest.mark.slow
def test_a_file_trains_goes_on_and_writes_text(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("abc" * 1500)
    prepare(Request(inputs=(text,)), tmp_path / "tokens")
    model = f"{NANO}:build"
    data = DataSettings(sources=(Source(folder=tmp_path / "tokens"),))
    made = job_of(tmp_path / "run", model, steps=40, dtype="float32", data=data, batch=Batch(8, 16))
    ranks.run(2, train, replace(made, grid=Grid(y=2)))
    curve = losses(tmp_path / "run")
    assert curve[-1] < 0.5 * curve[0]
    asked = ["sample", str(tmp_path / "run"), "--prompt", "abca", "--tokens", "12", "--temperature", "0"]
    assert exit_code(*asked) == 2
    assert "nothing is executed that a checkpoint names" in capsys.readouterr().err
    assert exit_code(*asked, "--model", model) == 0
    assert capsys.readouterr().out == "abca" + "bcabcabcabca" + "\n"
    assert exit_code("convert", str(tmp_path / "run"), str(tmp_path / "out")) == 2
    assert "nano_gpt.py:build, and only models of Hugging Face" in capsys.readouterr().err


@pytest.mark.slow
def test_text_of_a_folder_s_model(
    run: Path, folder: Path, tmp_path: Path, ranks: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("abc" * 1500)
    prepare(Request(inputs=(tmp_path / "text.txt",)), tmp_path / "tokens")
    data = DataSettings(sources=(Source(folder=tmp_path / "tokens"),))
    made = job_of(tmp_path / "run", str(folder), steps=2, data=data)
    ranks.run(1, train, made)
    assert exit_code("sample", str(tmp_path / "run"), "--tokens", "5", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"] <= 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": Batch(8, 17)}, "the model has 16 positions"),
        ({"layout": LayoutSettings(activations="sharded")}, "activations sharded between layers"),
        ({"grid": Grid(z=3)}, "cannot be cut"),
    ],
)
def test_what_cannot_work_is_refused_before_it_starts(folder: Path, tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check(job_of(tmp_path, str(folder), **changes))
    assert message in str(caught.value)


def test_sizes_are_for_presets_and_a_model_has_one_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.hidden is for presets"):
        check(job_of(tmp_path, "", model=ModelSettings(name=str(folder), hidden=8)))
    with pytest.raises(UserError, match="say the same: give one"):
        ModelSettings(name=str(folder), preset="gpt-tiny")
    assert ModelSettings(preset=str(folder)).source() == ModelSettings(name=str(folder)).source()
    with pytest.raises(UserError, match="did you mean 'gpt-tiny'"):
        ModelSettings(name="gpt-tyni").source()


def test_tokens_that_the_model_does_not_know_are_refused(tmp_path: Path) -> None:
    qwen(vocabulary=64).config.save_pretrained(tmp_path / "small")
    (tmp_path / "text.txt").write_text("abc" * 1500)
    prepare(Request(inputs=(tmp_path / "text.txt",)), tmp_path / "tokens")
    data = DataSettings(sources=(Source(folder=tmp_path / "tokens"),))
    with pytest.raises(UserError, match="the model one of 64: prepare the data with the tokenizer"):
        check(job_of(tmp_path / "run", str(tmp_path / "small"), data=data))
