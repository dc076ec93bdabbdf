"""The direction of a conversion, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cubeloom.base.errors import UserError
from cubeloom.models.hugging_face import READINGS
from cubeloom.models.hugging_face_model import FAMILY, is_known
from cubeloom.models.user_model import FAMILY as OF_A_FILE
from cubeloom.tools.convert.as_named import ExportAsNamed, ImportAsNamed
from cubeloom.tools.convert.carried_tokenizer import carry_tokenizer
from cubeloom.tools.convert.checkpoint_files import CheckpointWeights, is_checkpoint
from cubeloom.tools.convert.dtypes import plain
from cubeloom.tools.convert.exporting import Export
from cubeloom.tools.convert.hugging_face_folder import CONFIG, HuggingFaceFolder, is_hugging_face
from cubeloom.tools.convert.importing import Import
from cubeloom.tools.convert.place import check_place, written_whole
from cubeloom.train.checkpoint import newest

SHARD_SIZE = 5 * 10**9
Progress = Callable[[str, int, int], None]
"""Called with a description of the work, the bytes done, and the total."""


@dataclass(frozen=True, kw_only=True)
class Done:
    how: str
    """Imported or exported."""
    source: Path
    """The folder that was read, or the checkpoint in it."""
    target: Path
    model: dict[str, Any]
    tensors: int
    bytes: int
    dtypes: tuple[str, ...]
    files: int
    """Files with tensors."""


def convert(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_size: int | None = None,
    force: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Done:
    """Import a Hugging Face folder as a checkpoint, or export a checkpoint, or the newest of a run, as such a folder.

    Values stay bit-equal unless `dtype` is given. A file of an export has at most `shard_size` bytes of tensors, 5 GB
    by default.
    """
    check_place(source, target, force)
    found = find(source)
    work = _import(found, dtype, shard_size) if is_hugging_face(found) else _export(found, dtype, shard_size)
    total = sum(tensor.nbytes for tensor in work.tensors.values())
    done = 0

    def wrote(tensor: Tensor) -> None:
        nonlocal done
        done += tensor.nbytes
        progress(work.how, done, total)

    with written_whole(target) as folder:
        carry_tokenizer(found, folder)  # first, so that an export has checksums of all files
        files = work.write(folder, wrote)
    return Done(
        how=work.how,
        source=found,
        target=target,
        model=work.description,
        tensors=len(work.tensors),
        bytes=total,
        dtypes=tuple(sorted({plain(tensor.dtype) for tensor in work.tensors.values()})),
        files=files,
    )


def _import(source: Path, dtype: torch.dtype | None, shard_size: int | None) -> Import | ImportAsNamed:
    """As one of our models, or, if ours has none, with its own names."""
    if shard_size is not None:
        raise UserError(f"--shard-size is for an export, and {source} is a Hugging Face folder, which is imported")
    folder = HuggingFaceFolder(source)
    kind = folder.config.get("model_type")
    named = isinstance(kind, str) and kind not in READINGS and is_known(kind)
    return ImportAsNamed(folder, dtype) if named else Import(folder, dtype)


def _export(checkpoint: Path, dtype: torch.dtype | None, shard_size: int | None) -> Export | ExportAsNamed:
    weights, size = CheckpointWeights(checkpoint), SHARD_SIZE if shard_size is None else shard_size
    if weights.family == OF_A_FILE:
        said = weights.progress["model"]
        raise UserError(
            f"{checkpoint} is of {said.get('file')}:{said.get('function')}, and only models of Hugging Face and gpt, llama and"
            " bert have such a folder; its own files are safetensors"
        )
    kind = ExportAsNamed if weights.family == FAMILY else Export
    return kind(checkpoint, weights, dtype, size)


def find(source: Path) -> Path:
    """A Hugging Face folder, a checkpoint, or the newest checkpoint of a run."""
    if not source.is_dir():
        raise UserError(f"no folder {source}")
    if is_hugging_face(source) or is_checkpoint(source):
        return source
    found = newest(source)
    if found is not None:
        return found
    raise UserError(
        f"{source} is neither a Hugging Face folder, which has {CONFIG}, nor a checkpoint of cubeloom or a run with one, "
        "which have step-* with a manifest"
    )
