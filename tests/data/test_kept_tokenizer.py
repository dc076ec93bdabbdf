"""The tokenizer goes with the run, the export and the import; transformers reads it, and gives the same tokens."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import exit_code
from cubeloom.base.errors import UserError
from cubeloom.base.files import write_sealed
from cubeloom.launch import RankPool
from cubeloom.parallel import Batch
from cubeloom.tools.convert import convert
from cubeloom.train.data import Request, TokenFile, prepare
from cubeloom.train.data.kept_tokenizer import keep, kept
from cubeloom.train.job import Job
from cubeloom.train.job.settings import DataSettings, ModelSettings, Source
from cubeloom.train.loop import train

from .chats import CHATML, TWO_TURNS, records, tokenizer_folder

TEXT = "def f(x):\n    return 'Grüße → 你好' \t# done\x00\x7f\xad"


def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(params=["bytes", "bpe", "folder"])
def tokens(request: pytest.FixtureRequest, tmp_path: Path) -> TokenFile:
    source = records(tmp_path / "chat.jsonl", [{"messages": TWO_TURNS}, {"text": TEXT}])
    kind = str(tokenizer_folder(tmp_path / "theirs")) if request.param == "folder" else request.param
    return prepare(Request(inputs=(source,), tokenizer=kind, validation=0), tmp_path / "tokens").file


def test_what_is_kept_gives_the_same_tokens_here_and_in_transformers(tokens: TokenFile, tmp_path: Path) -> None:
    keep(tokens.tokenizer, tokens.tokenizer_texts, tmp_path)
    here, there = kept(tmp_path), theirs(tmp_path / "tokenizer")
    assert here is not None and here.fingerprint == tokens.tokenizer.fingerprint and here.end == tokens.meta.end
    (expected,) = tokens.tokenizer.encode([TEXT])
    assert here.encode([TEXT])[0].tolist() == there.encode(TEXT, add_special_tokens=False) == expected.tolist()
    assert there.decode(expected.tolist()) == TEXT
    assert there.eos_token_id == tokens.meta.end
    chat = there.apply_chat_template(TWO_TURNS, return_dict=False)
    assert tokens.document(0).tolist()[: len(chat)] == chat


def test_a_changed_file_is_refused(tokens: TokenFile, tmp_path: Path) -> None:
    keep(tokens.tokenizer, tokens.tokenizer_texts, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "kept.json"):
        shutil.copytree(tmp_path / "tokenizer", tmp_path / name / "tokenizer")
        file = tmp_path / name / "tokenizer" / name
        file.write_text(file.read_text().replace("e", "f", 1))
        with pytest.raises(UserError, match=f"{name} is damaged"):
            kept(tmp_path / name)
    assert kept(tmp_path / "nowhere") is None
    write_sealed(tmp_path / "tokenizer" / "kept.json", {"end": 3, "fingerprint": "bytes", "files": {}})
    with pytest.raises(UserError, match=r"kept.json is damaged"):
        kept(tmp_path)


@pytest.mark.slow
def test_run_export_and_import_have_it(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also once the data have gone."""
    source = records(tmp_path / "chat.jsonl", [{"messages": TWO_TURNS}] * 9)
    folder = str(tokenizer_folder(tmp_path / "theirs"))
    prepare(Request(inputs=(source,), tokenizer=folder, validation=0), tmp_path / "tokens")
    job = Job(
        folder=tmp_path / "run",
        steps=1,
        model=ModelSettings(preset="llama-tiny", layers=1),
        batch=Batch(2, 16),
        data=DataSettings(sources=(Source(folder=tmp_path / "tokens"),)),
    )
    ranks.run(1, train, job)
    shutil.rmtree(tmp_path / "tokens")
    assert exit_code("sample", job.folder, "--prompt", "one", "--tokens", 3, "--json") == 0
    convert(job.folder, tmp_path / "exported")
    convert(tmp_path / "exported", tmp_path / "imported")
    convert(tmp_path / "imported", tmp_path / "again")
    convert(tmp_path / "imported", tmp_path / "again", force=True)
    expected = theirs(tmp_path / "theirs")
    for place in ("exported", "again"):
        found = theirs(tmp_path / place)
        assert found.apply_chat_template(TWO_TURNS) == expected.apply_chat_template(TWO_TURNS)
        assert (found.eos_token, found.chat_template) == ("<|im_end|>", CHATML)
    (tmp_path / "exported" / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer.json is damaged"):
        convert(tmp_path / "exported", tmp_path / "other")
    ranks.run(1, train, replace(job, folder=tmp_path / "random", data=DataSettings()))
    assert not (tmp_path / "random" / "tokenizer").exists()
