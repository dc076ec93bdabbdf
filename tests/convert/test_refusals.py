"""What cannot be converted is refused in one sentence, and leaves nothing behind."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cubeloom import UserError
from cubeloom.tools.convert import convert
from cubeloom.tools.convert.importing import Import
from cubeloom.train.checkpoint import checkpoints, read_manifest, seal

from . import folders


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folders.saved(tmp_path / "theirs", folders.prepare(folders.gpt2()))


@pytest.fixture
def nothing_written(tmp_path: Path, source: Path) -> Iterator[None]:
    before = {path.name for path in tmp_path.iterdir()}
    yield
    assert {path.name for path in tmp_path.iterdir()} == before


def refusal(source: Path, **options: Any) -> str:
    with pytest.raises(UserError) as refused:
        convert(source, source.parent / "target", **options)
    return str(refused.value)


def without(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def having(**values: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name.replace("_0_", "."): value for name, value in values.items()})


@pytest.mark.usefixtures("nothing_written")
class TestImport:
    def test_no_folder_at_all(self, tmp_path: Path) -> None:
        assert refusal(tmp_path / "nowhere") == f"no folder {tmp_path / 'nowhere'}"

    def test_a_checkpoint_of_others(self, source: Path) -> None:
        (source / "config.json").unlink()
        (source / ".metadata").touch()
        assert refusal(source).startswith(f"{source} is neither a Hugging Face folder, which has config.json, nor a")

    def test_neither_theirs_nor_ours(self, source: Path) -> None:
        (source / "config.json").unlink()
        assert "is neither a Hugging Face folder, which has config.json, nor a checkpoint" in refusal(source)

    def test_no_safetensors(self, source: Path) -> None:
        (source / "model.safetensors").rename(source / "pytorch_model.bin")
        assert "neither model.safetensors nor model.safetensors.index.json, but config.json, " in refusal(source)

    def test_an_unknown_model(self, source: Path) -> None:
        folders.change_config(source, model_type="lama")
        said = "no model here is Hugging Face's 'lama'; those that are: gpt2, llama, bert, of which llama is nearest"
        assert refusal(source) == f"{source}: {said}"
        folders.change_config(source, model_type=None)
        assert "no model here is Hugging Face's None" in refusal(source)

    def test_an_option_that_is_not_ours(self, source: Path) -> None:
        folders.change_config(source, activation_function="relu")
        assert "gpt2 with activation_function='relu' is not supported; it must be 'gelu_new'" in refusal(source)

    @pytest.mark.parametrize(
        ("their", "value", "said"),
        [
            ("n_embd", "wide", "n_embd = 'wide' should be a whole number"),
            ("n_layer", 2.5, "n_layer = 2.5 should be a whole number"),
            ("n_head", 0, "n_head must be from 1 to 16,777,216, got 0"),
            ("n_embd", 10**15, "n_embd must be from 1 to 16,777,216"),
            ("n_layer", 10**9, "n_layer must be from 1 to 2,000"),
            ("resid_pdrop", 5, "resid_pdrop must be at least 0 and below 1"),
            ("layer_norm_epsilon", float("nan"), "layer_norm_epsilon = nan is not a finite number"),
            ("tie_word_embeddings", "yes", "tie_word_embeddings = 'yes' should be true or false"),
            ("model_type", ["gpt2"], "no model here is Hugging Face's ['gpt2']"),
        ],
    )
    def test_a_word_where_a_number_belongs(self, source: Path, their: str, value: object, said: str) -> None:
        folders.change_config(source, **{their: value})
        assert refusal(source).startswith(f"{source}: {said}")

    def test_a_config_that_is_no_json(self, source: Path) -> None:
        (source / "config.json").write_text("{")
        assert refusal(source).startswith(f"{source / 'config.json'} is damaged: it is not JSON")
        (source / "config.json").write_text("[]")
        assert refusal(source) == f"{source / 'config.json'} is damaged: it should be a JSON object"

    def test_a_missing_tensor(self, source: Path) -> None:
        folders.change_tensors(source, without("transformer.h.1.mlp.c_fc.bias"))
        assert refusal(source).endswith("): missing: transformer.h.1.mlp.c_fc.bias")

    def test_an_unexpected_tensor(self, source: Path) -> None:
        folders.change_tensors(source, having(transformer_0_adapter=torch.zeros(2)))
        assert refusal(source).endswith("): unexpected: transformer.adapter")

    def test_another_shape(self, source: Path) -> None:
        folders.change_config(source, vocab_size=65)
        assert refusal(source).endswith("): of another shape: transformer.wte.weight [64, 32] for [65, 32]")

    def test_tied_tensors_that_differ(self, source: Path) -> None:
        folders.change_tensors(source, having(lm_head_0_weight=torch.zeros(64, 32)))
        assert "lm_head.weight and transformer.wte.weight differ, but config.json says" in refusal(source)

    def test_another_kind_of_numbers(self, source: Path) -> None:
        folders.change_tensors(source, having(transformer_0_wte_0_weight=torch.zeros(64, 32, dtype=torch.int8)))
        assert "transformer.wte.weight in " in (said := refusal(source))
        assert said.endswith("is stored as I8; it must be F64, F32, F16, BF16")

    def test_a_size_of_shards(self, source: Path) -> None:
        assert refusal(source, shard_size=10).startswith("--shard-size is for an export, and ")

    @pytest.mark.parametrize("kept", [0, 7, 100, -1])
    def test_a_damaged_file(self, source: Path, kept: int) -> None:
        file = source / "model.safetensors"
        file.write_bytes(file.read_bytes()[:kept])
        assert refusal(source).startswith(f"{file} is damaged, or not a safetensors file: ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rope_parameters": 5}, "rope_parameters=5 is not supported"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "far"}}, "rope_theta = 'far' should be a number"),
    ],
)
def test_rotary_positions_that_are_no_numbers(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    source = folders.saved(tmp_path / "theirs", folders.prepare(folders.llama()))
    folders.change_config(source, **options)
    assert said in refusal(source)


def test_parts_of_one_tensor_in_two_dtypes(tmp_path: Path) -> None:
    source = folders.saved(tmp_path / "theirs", folders.prepare(folders.llama()))
    name = "model.layers.0.self_attn.k_proj.weight"
    folders.change_tensors(source, lambda tensors: tensors.update({name: tensors[name].half()}))
    assert f"{name} float16" in (said := refusal(source))
    assert said.startswith("blocks.0.attention.qkv.weight is made of tensors of one dtype, and these are ")
    convert(source, tmp_path / "ours", dtype=torch.float32)


def test_shards_that_do_not_fit_together(tmp_path: Path) -> None:
    source = folders.saved(tmp_path / "theirs", folders.prepare(folders.gpt2()), max_shard_size="40KB")
    index, shards = source / "model.safetensors.index.json", sorted(source.glob("*.safetensors"))
    good = json.loads(index.read_text())
    bad = {**good, "weight_map": {**good["weight_map"], "transformer.wpe.weight": shards[-1].name}}
    index.write_text(json.dumps(bad))
    assert refusal(source) == f"{index} says that transformer.wpe.weight is in {shards[-1].name}, and it is not there"
    index.write_text("{}")
    assert "weight_map should say in which file each tensor is" in refusal(source)
    index.write_text(json.dumps(good))
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-5])
    assert refusal(source).startswith(f"{shards[1]} is damaged, or not a safetensors file: ")
    shards[1].write_bytes(shards[0].read_bytes())
    assert refusal(source).endswith(f"is in {shards[0].name} and again in {shards[1]}")
    shards[1].unlink()
    assert refusal(source) == f"{source} is not whole: {shards[1].name} is missing"


@pytest.fixture
def ours(tmp_path: Path, source: Path) -> Path:
    convert(source, tmp_path / "ours")
    return tmp_path / "ours"


def change_manifest(checkpoint: Path, **progress: Any) -> None:
    manifest = read_manifest(checkpoint)
    seal(checkpoint, manifest["step"], {**manifest["progress"], **progress})


class TestExport:
    def test_no_description(self, ours: Path) -> None:
        (checkpoint,) = checkpoints(ours)
        change_manifest(checkpoint, model=None)
        said = f'the checkpoint {checkpoint} does not say of which model it is: its manifest has no "model"'
        assert refusal(ours) == said

    def test_an_unknown_description(self, ours: Path) -> None:
        (checkpoint,) = checkpoints(ours)
        change_manifest(checkpoint, model={"family": "lama"})
        assert "unknown family of models 'lama'; did you mean 'llama'?" in refusal(ours)
        change_manifest(checkpoint, model={"family": "resnet", "blocks": [1], "classes": 2})
        assert refusal(ours).endswith("is of a resnet; those of gpt, llama and bert can be exported")

    def test_a_description_of_another_model(self, ours: Path) -> None:
        (checkpoint,) = checkpoints(ours)
        model = read_manifest(checkpoint)["progress"]["model"]
        change_manifest(checkpoint, model={**model, "layers": 1})
        assert "unexpected: blocks.1.norm1.weight, " in refusal(ours)
        change_manifest(checkpoint, model={**model, "layers": 3})
        assert "missing: blocks.2.norm1.weight, " in refusal(ours)
        change_manifest(checkpoint, model={**model, "vocab": 60})
        assert refusal(ours).endswith("of another shape: embed.weight [64, 32] for [60, 32]")

    def test_a_damaged_file(self, ours: Path) -> None:
        (checkpoint,) = checkpoints(ours)
        file = next(checkpoint.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1])
        assert refusal(ours) == f"the checkpoint {checkpoint} is damaged: {file.name} is not what was written"


class TestPlace:
    def test_what_is_there_is_kept_unless_forced(self, source: Path, ours: Path) -> None:
        before = folders.content(ours)
        with pytest.raises(UserError, match=r"ours is there already; --force replaces it$"):
            convert(source, ours)
        assert folders.content(ours) == before
        convert(source, ours, dtype=torch.bfloat16, force=True)
        assert convert(ours, ours.parent / "back").dtypes == ("bfloat16",)
        convert(ours, ours.parent / "back", dtype=torch.float32, force=True)
        assert sorted(path.name for path in ours.parent.iterdir()) == ["back", "ours", "theirs"]

    def test_what_no_conversion_wrote_is_never_removed(self, source: Path, ours: Path) -> None:
        (ours / "notes.txt").write_text("mine")
        with pytest.raises(UserError, match=r"ours holds notes.txt, which no conversion writes"):
            convert(source, ours, force=True)
        assert (ours / "notes.txt").read_text() == "mine"
        with pytest.raises(UserError, match=r"notes.txt is there already, and is not a folder"):
            convert(source, ours / "notes.txt", force=True)

    def test_checkpoints_of_a_training_are_never_removed(self, source: Path, ours: Path) -> None:
        (trained := ours / "step-00000100").mkdir()
        with pytest.raises(UserError, match=r"ours holds step-00000100, which no conversion writes"):
            convert(source, ours, force=True)
        assert trained.exists()

    def test_what_a_killed_one_left_is_no_obstacle(self, source: Path, ours: Path) -> None:
        for left in (".ours.replaced", ".ours.writing"):
            (ours.parent / left / "step-00000000").mkdir(parents=True)
        convert(source, ours, dtype=torch.bfloat16, force=True)
        assert convert(ours, ours.parent / "back").dtypes == ("bfloat16",)
        assert sorted(path.name for path in ours.parent.iterdir()) == ["back", "ours", "theirs"]

    @pytest.mark.parametrize("target", [".", "..", "../theirs"])
    def test_the_source_is_never_replaced(self, source: Path, target: str) -> None:
        before = folders.content(source.parent)
        with pytest.raises(UserError, match=r"cannot be written: .*, which is read, is there$"):
            convert(source, source / target, force=True)
        assert folders.content(source.parent) == before

    @pytest.mark.usefixtures("nothing_written")
    def test_a_failure_leaves_nothing(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write, full = Import.write, OSError(errno.ENOSPC, "No space left on device")

        def fails(self: Import, folder: Path, wrote: Callable[[Tensor], None]) -> int:
            write(self, folder, wrote)
            raise full

        monkeypatch.setattr(Import, "write", fails)
        assert refusal(source) == f"{source.parent / 'target'} cannot be written: No space left on device"

    def test_a_failure_leaves_what_was_there(self, source: Path, ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = folders.content(ours)

        def interrupted(self: Import, folder: Path, wrote: Callable[[Tensor], None]) -> int:
            (folder / "step-00000000").mkdir()
            raise KeyboardInterrupt

        monkeypatch.setattr(Import, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(source, ours, force=True)
        assert folders.content(ours) == before
        assert sorted(path.name for path in ours.parent.iterdir()) == ["ours", "theirs"]

    def test_what_was_there_comes_back(self, source: Path, ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before, rename = folders.content(ours), Path.rename

        def fails(path: Path, to: Path) -> Path:
            if path.name == ".ours.writing":
                raise OSError(errno.EIO, "Input/output error")
            return rename(path, to)

        monkeypatch.setattr(Path, "rename", fails)
        with pytest.raises(UserError, match=r"ours cannot be written: Input/output error$"):
            convert(source, ours, dtype=torch.bfloat16, force=True)
        assert folders.content(ours) == before
        assert sorted(path.name for path in ours.parent.iterdir()) == ["ours", "theirs"]

    def test_a_folder_that_cannot_be_made(self, source: Path) -> None:
        (source.parent / "file").touch()
        with pytest.raises(UserError, match=r"cannot be written: Not a directory$"):
            convert(source, source.parent / "file" / "target")


@pytest.mark.slow
def test_a_disk_that_fills(tmp_path: Path, ours: Path) -> None:
    """For want of a full disk, files may not grow past a few KB: a write fails in the middle, as it would there."""
    program = """
import resource, sys
from pathlib import Path
from cubeloom import UserError
from cubeloom.cli.convert import Convert

resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, 9_000))
for source in sys.argv[2:]:
    try:
        Convert(source=Path(source), target=Path(sys.argv[1]))()
    except UserError as error:
        print(error, file=sys.stderr)
"""
    target = tmp_path / "target"
    command = [sys.executable, "-c", program, *map(str, (target, tmp_path / "theirs", ours))]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stderr == 2 * f"{target} cannot be written: File too large\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]
