"""Which way a conversion goes, and what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cubeloom.base.errors import UserError
from cubeloom.models.description import describe
from cubeloom.tools.convert.checkpoint_files import is_checkpoint
from cubeloom.tools.convert.dtypes import plain
from cubeloom.tools.convert.exporting import Export
from cubeloom.tools.convert.hugging_face_folder import CONFIG, is_hugging_face
from cubeloom.tools.convert.importing import Import
from cubeloom.tools.convert.place import check_place, written_whole
from cubeloom.train.checkpoint import newest

SHARD_SIZE = 5 * 10**9
Progress = Callable[[str, int, int], None]
"""Told what is done, and how many bytes of how many."""


@dataclass(frozen=True, kw_only=True)
class Done:
    how: str
    """imported or exported"""
    source: Path
    """The folder, or the one checkpoint of it, that was read."""
    target: Path
    model: dict[str, Any]
    tensors: int
    bytes: int
    dtypes: tuple[str, ...]
    files: int
    """That hold tensors."""


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

    Values are kept to the bit, unless `dtype` asks for another kind of numbers. A file of an export has at most `shard_size`
    bytes of tensors, 5 GB by default.
    """
    check_place(source, target, force)
    found = find(source)
    work: Import | Export
    if is_hugging_face(found):
        if shard_size is not None:
            raise UserError(f"--shard-size is for an export, and {source} is a Hugging Face folder, which is imported")
        work = Import(found, dtype)
    else:
        work = Export(found, dtype, SHARD_SIZE if shard_size is None else shard_size)
    total = sum(tensor.nbytes for tensor in work.tensors.values())
    done = 0

    def wrote(tensor: Tensor) -> None:
        nonlocal done
        done += tensor.nbytes
        progress(work.how, done, total)

    with written_whole(target) as folder:
        files = work.write(folder, wrote)
    return Done(
        how=work.how,
        source=found,
        target=target,
        model=describe(work.config),
        tensors=len(work.tensors),
        bytes=total,
        dtypes=tuple(sorted({plain(tensor.dtype) for tensor in work.tensors.values()})),
        files=files,
    )


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
