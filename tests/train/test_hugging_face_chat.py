"""A Hugging Face folder learns the answers of conversations on any grid, and leaves as a folder that transformers reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import job

from cubeloom import Grid
from cubeloom.launch import RankPool
from cubeloom.tools.convert import convert
from cubeloom.tools.evaluate import Evaluation, evaluate
from cubeloom.train.data import Request, TokenFile, prepare
from cubeloom.train.data.stream import IGNORED
from cubeloom.train.job import Job, check
from cubeloom.train.job.settings import DataSettings, EvaluationSettings, ModelSettings, Source
from cubeloom.train.loop import train
from cubeloom.train.metrics.log import read_log
from data.chats import TWO_TURNS, records, tokenizer_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]


@pytest.fixture(scope="module")
def what(tmp_path_factory: pytest.TempPathFactory) -> Job:
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("chat")
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = LlamaConfig(vocab_size=288, max_position_embeddings=32, architectures=["LlamaForCausalLM"], **sizes)
    config.save_pretrained(folder / "llama")
    rows: list[dict[str, Any]] = [{"question": "a" * (1 + n % 5), "answer": "b" * (1 + n % 7)} for n in range(30)]
    source = records(folder / "chat.jsonl", [*rows, {"messages": TWO_TURNS}])
    tokenizer = str(tokenizer_folder(folder / "tokenizer"))
    prepare(Request(inputs=(source,), tokenizer=tokenizer, validation=0.3), folder / "tokens")
    return job(
        folder / "run",
        steps=4,
        microbatches=1,
        model=ModelSettings(name=str(folder / "llama")),
        data=DataSettings(sources=(Source(folder=folder / "tokens"),), packing=True),
        batch=replace(job(folder).batch, sequence=32),
        evaluation=EvaluationSettings(every=2, batches=1),
    )


@pytest.fixture(scope="module")
def alone(ranks: RankPool, what: Job) -> Job:
    check(what)
    ranks.run(1, train, what)
    return what


@pytest.mark.parametrize("grid", ["pipe=2,y=2", pytest.param("z=2,y=2", marks=pytest.mark.long)])
def test_every_grid_learns_the_same_answers(ranks: RankPool, alone: Job, tmp_path: Path, grid: str) -> None:
    other = replace(alone, folder=tmp_path, grid=Grid.parse(grid), schedule=replace(alone.schedule, microbatches=2))
    check(other)
    ranks.run(other.grid.world, train, other)
    for mine, theirs in zip(*(read_log(each.folder / "metrics.jsonl").records for each in (other, alone)), strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-9)
        assert (mine.validation or 0) == pytest.approx(theirs.validation or 0, rel=1e-9)


def test_transformers_has_the_same_loss_on_the_export(ranks: RankPool, alone: Job, tmp_path: Path) -> None:
    """And the tokenizer; each of its targets counts as much."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def run(count: int, function: Any, *arguments: Any, timeout: float) -> list[Any]:
        return ranks.run(count, function, *arguments)

    found = evaluate(Evaluation(given=alone.folder), run)
    convert(alone.folder, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    file = TokenFile(alone.data.sources[0].tokens)
    assert tokenizer.apply_chat_template(TWO_TURNS, return_dict=False) == file.document(21).tolist()[:-1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    stream = file.stream(32, part="validation", packing=True)
    batch = stream.batch(torch.arange(stream.windows))
    labels = torch.full_like(batch["targets"], IGNORED)
    labels[:, 1:] = batch["targets"][:, :-1]
    loss = model(input_ids=batch["tokens"], labels=labels).loss.item()
    assert found is not None and found.loss == pytest.approx(loss, rel=1e-6)  # it computes its logits in float32
    assert found.targets == int((labels != IGNORED).sum())
