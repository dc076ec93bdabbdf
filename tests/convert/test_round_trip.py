"""From Hugging Face to a checkpoint and back nothing changes, and transformers reads what comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cubeloom.models import PRESETS, LanguageConfig
from cubeloom.tools.convert import convert
from cubeloom.tools.convert.hugging_face_config import write_config
from cubeloom.train.checkpoint import checkpoints, read_manifest, seal

from . import folders

every_model = pytest.mark.parametrize("make", folders.MODELS.values(), ids=folders.MODELS.keys())


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_file_comes_back_byte_for_byte(
    tmp_path: Path, make: Callable[[], folders.Theirs], dtype: torch.dtype
) -> None:
    theirs = folders.prepare(make(), dtype)
    source = folders.saved(tmp_path / "theirs", theirs)
    imported = convert(source, tmp_path / "ours")
    exported = convert(tmp_path / "ours", tmp_path / "back")
    assert (imported.how, exported.how) == ("imported", "exported")
    assert imported.model == exported.model
    assert exported.source == tmp_path / "ours" / "step-00000000"
    written = folders.content(tmp_path / "back")
    assert sorted(written) == ["checksums.json", "config.json", "model.safetensors"]
    assert written["model.safetensors"] == (source / "model.safetensors").read_bytes()
    assert json.loads(written["config.json"]) == json.loads((source / "config.json").read_text())
    again = folders.loaded(tmp_path / "back", theirs)
    assert again.dtype == dtype
    assert torch.equal(folders.logits(again), folders.logits(theirs))


@every_model
def test_transformers_reads_a_checkpoint_that_never_was_theirs(
    tmp_path: Path, make: Callable[[], folders.Theirs]
) -> None:
    """Without the config.json that an import keeps."""
    theirs = folders.prepare(make())
    convert(folders.saved(tmp_path / "theirs", theirs), tmp_path / "ours")
    (checkpoint,) = checkpoints(tmp_path / "ours")
    manifest = read_manifest(checkpoint)
    del manifest["progress"]["hugging_face"]
    seal(checkpoint, manifest["step"], manifest["progress"])
    convert(checkpoint, tmp_path / "back")
    again = folders.loaded(tmp_path / "back", theirs)
    assert torch.equal(folders.logits(again), folders.logits(theirs))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == [type(theirs).__name__]


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_shards_of_any_size_on_either_side(tmp_path: Path) -> None:
    theirs = folders.prepare(folders.llama())
    source = folders.saved(tmp_path / "theirs", theirs, max_shard_size="20KB")
    whole = folders.saved(tmp_path / "whole", theirs)
    assert len(list(source.glob("*.safetensors"))) > 2
    convert(source, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "one")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    for size in (30_000, 4_000):  # the second is smaller than most tensors
        back = tmp_path / str(size)
        done = convert(tmp_path / "ours", back, shard_size=size)
        index = json.loads((back / "model.safetensors.index.json").read_text())
        shards = [load_file(file) for file in back.glob("*.safetensors")]
        assert done.files == len(shards) > 1
        assert all(sum(tensor.nbytes for tensor in shard.values()) <= size or len(shard) == 1 for shard in shards)
        assert index["metadata"] == {
            "total_parameters": theirs.num_parameters(),
            "total_size": 4 * theirs.num_parameters(),
        }
        for name, file in index["weight_map"].items():
            with safe_open(back / file, "pt") as opened:
                assert torch.equal(opened.get_tensor(name), stored(whole)[name])
        assert index["weight_map"].keys() == stored(whole).keys()
        assert torch.equal(folders.logits(folders.loaded(back, theirs)), folders.logits(theirs))


@pytest.mark.parametrize("kind", ["gpt2", "llama tied", "bert"])
def test_a_tied_tensor_may_be_stored_twice(tmp_path: Path, kind: str) -> None:
    theirs = folders.prepare(folders.MODELS[kind]())
    source = folders.saved(tmp_path / "theirs", theirs)
    once = (source / "model.safetensors").read_bytes()
    both = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    save_file(both, source / "model.safetensors", metadata={"format": "pt"})
    assert len(both) > len(json.loads(once[8 : 8 + int.from_bytes(once[:8], "little")])) - 1
    convert(source, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == once


def test_a_gpt2_and_a_bert_as_first_published(tmp_path: Path) -> None:
    """Without prefix, with other names for norms, and with fewer entries in config.json."""
    gpt2 = folders.saved(tmp_path / "gpt2", folders.prepare(folders.gpt2()))
    today = (gpt2 / "model.safetensors").read_bytes()
    folders.change_config(gpt2, tie_word_embeddings=None, dtype=None)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in stored(gpt2).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 8, 8)}, gpt2 / "model.safetensors")
    convert(gpt2, tmp_path / "gpt2 ours")
    convert(tmp_path / "gpt2 ours", tmp_path / "gpt2 back")
    assert (tmp_path / "gpt2 back" / "model.safetensors").read_bytes() == today

    theirs = folders.prepare(folders.bert_for_pretraining())
    bert = folders.saved(tmp_path / "bert", theirs)
    today = (bert / "model.safetensors").read_bytes()
    folders.change_config(bert, tie_word_embeddings=None, architectures=["BertForMaskedLM"])
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {
        next((name.replace(new, old[new]) for new in old if new in name), name): tensor
        for name, tensor in stored(bert).items()
    }
    save_file(tensors, bert / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(folders.logits(folders.loaded(bert, theirs)), folders.logits(theirs))  # they know them too
    convert(bert, tmp_path / "bert ours")
    convert(tmp_path / "bert ours", tmp_path / "bert back")
    assert (tmp_path / "bert back" / "model.safetensors").read_bytes() == today


def test_another_dtype_where_it_is_asked_for(tmp_path: Path) -> None:
    source = folders.saved(tmp_path / "theirs", folders.prepare(folders.llama()))
    expected = {name: tensor.bfloat16() for name, tensor in stored(source).items()}
    done = convert(source, tmp_path / "ours", dtype=torch.bfloat16)
    assert done.dtypes == ("bfloat16",)
    convert(tmp_path / "ours", tmp_path / "back")
    found = stored(tmp_path / "back")
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == torch.bfloat16 and torch.equal(found[name], expected[name]) for name in found)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    convert(tmp_path / "ours", tmp_path / "wide", dtype=torch.float64)
    assert all(torch.equal(tensor, expected[name].double()) for name, tensor in stored(tmp_path / "wide").items())


def test_tensors_of_several_dtypes_keep_theirs(tmp_path: Path) -> None:
    source = folders.saved(tmp_path / "theirs", folders.prepare(folders.llama(), torch.bfloat16))
    wide = lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].float()})  # noqa: E731
    folders.change_tensors(source, wide)
    assert convert(source, tmp_path / "ours").dtypes == ("bfloat16", "float32")
    convert(tmp_path / "ours", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_bits_are_kept_that_are_no_numbers(tmp_path: Path) -> None:
    source = folders.saved(tmp_path / "theirs", folders.prepare(folders.gpt2(), torch.bfloat16))

    def poison(tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            tensor.view(torch.int16).random_(-(2**15), 2**15)  # any bits: many a NaN, of all kinds

    folders.change_tensors(source, poison)
    convert(source, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize("preset", [name for name, config in PRESETS.items() if isinstance(config, LanguageConfig)])
def test_configurations_are_what_transformers_reads(preset: str) -> None:
    config = PRESETS[preset]
    assert isinstance(config, LanguageConfig)
    made = write_config(config, "float32", {})
    read = transformers.AutoConfig.for_model(**made).to_dict()
    assert {key: read[key] for key in made if key in read} == {key: made[key] for key in made if key in read}
    assert made.keys() - read.keys() <= {"rope_theta", "position_embedding_type"}  # of versions before transformers 5


def test_a_llama_configuration_as_first_published(tmp_path: Path) -> None:
    """Before there were grouped heads, and with rotary positions as transformers 4 wrote them."""
    theirs = folders.prepare(folders.llama(kv_heads=8, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}))
    source = folders.saved(tmp_path / "theirs", theirs)
    gone = dict.fromkeys(("num_key_value_heads", "tie_word_embeddings", "rope_parameters", "head_dim"))
    folders.change_config(source, **gone, rope_theta=5e5, torch_dtype="float32")
    convert(source, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back")
    assert torch.equal(folders.logits(folders.loaded(tmp_path / "back", theirs)), folders.logits(theirs))
