"""`cubeloom convert`: Hugging Face folders to checkpoints, and back."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console

from cubeloom.base import dtypes
from cubeloom.base.errors import UserError, counted
from cubeloom.cli.data import shown

if TYPE_CHECKING:
    from cubeloom.tools.convert import Done

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Import a Hugging Face folder (GPT-2, Llama, BERT) as a checkpoint, or export a checkpoint as such a folder.

    SOURCE decides the direction. One tensor is held at a time, never the whole model. TARGET is written atomically.
    """

    source: tyro.conf.Positional[Path]
    """A folder with config.json and safetensors; or a checkpoint; or a run, whose newest checkpoint is used."""
    target: tyro.conf.Positional[Path]
    """The folder to write."""
    dtype: Literal["float64", "float32", "float16", "bfloat16"] | None = None
    """The dtype to write; by default values are unchanged, bit for bit."""
    shard_size: str | None = None
    """For an export: the largest number of tensor bytes per file, such as 500MB; 5GB by default."""
    force: bool = False
    """Replace TARGET if an earlier conversion wrote it."""
    json: Annotated[bool, tyro.conf.arg(aliases=["-j"])] = False
    """Print one JSON object as the last line."""

    def __call__(self) -> int:
        from cubeloom.tools.convert import convert

        console = Console(stderr=self.json)
        with shown(console) as progress:
            done = convert(
                self.source,
                self.target,
                dtype=None if self.dtype is None else dtypes.as_torch(self.dtype),
                shard_size=None if self.shard_size is None else bytes_of(self.shard_size),
                force=self.force,
                progress=progress,
            )
        console.print(
            f"{done.target}: {done.how} a {done.model['family']} of {done.tensors} tensors, {done.bytes:,} bytes of "
            f"{' and '.join(done.dtypes)}, in {counted(done.files, 'file')}",
            highlight=False,
            soft_wrap=True,
        )
        if self.json:
            print(json.dumps(as_json(done)))
        return 0


def bytes_of(size: str) -> int:
    """The bytes of `500MB` or `1.5 GB`, in powers of a thousand as in transformers."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", size.strip().upper())
    count = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if count < 1:
        raise UserError(f"--shard-size {size}: it must be a number of bytes, KB, MB, GB or TB, such as 500MB")
    return count


def as_json(done: Done) -> dict[str, object]:
    return {**asdict(done), "source": str(done.source), "target": str(done.target)}
