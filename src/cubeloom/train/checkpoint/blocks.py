"""Writes and reads the blocks of tensors: each rank writes its own file, and reads its blocks from any files.

Only sizes and numbers are stored (safetensors), so reading a checkpoint executes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from cubeloom.base.errors import UserError
from cubeloom.comm import HostGroup
from cubeloom.train.checkpoint.index import INDEX, Index, StoredBlock, StoredTensor, entry_of, write_index
from cubeloom.train.checkpoint.shard import Shard
from cubeloom.train.checkpoint.tensor_file import CODES, TensorFile


class HeldShard(NamedTuple):
    """A shard without its values: what rank 0 needs to assign its writing to a rank."""

    name: str
    dtype: torch.dtype
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    number: int = 0  # among this rank's shards of the tensor

    @property
    def entry(self) -> str:
        return entry_of(self.name, self.number)


def assign(shards: Mapping[str, Shard], host_group: HostGroup) -> tuple[dict[str, Shard], Index | None]:
    """The shards that this rank must write, so that equal ones are written once; on rank 0 also the index of all.

    Called by all ranks.
    """
    own = {
        HeldShard(name, each.local.dtype, each.whole, each.offset, tuple(each.local.shape), number): each
        for name, shard in shards.items()
        for number, each in enumerate(shard.written())
    }
    found: list[Index] = []

    def rule(of_all: Sequence[list[HeldShard]]) -> list[list[str]]:
        names, index = assigned(of_all)
        found.append(index)
        return names

    chosen = set(host_group.assign(list(own), rule))
    return {held.entry: each for held, each in own.items() if held.entry in chosen}, found[0] if found else None


def write_blocks(folder: Path, rank: int, shards: Mapping[str, Shard], index: Index | None) -> list[Path]:
    """Write this rank's file, and the index if given; return the written files."""
    wrote = []
    tensors = {entry: shard.local for entry, shard in shards.items()}
    if tensors:
        file = TensorFile(folder / file_of(rank), tensors)
        for name, tensor in tensors.items():
            file.write(name, tensor)
        file.finish()
        wrote.append(file.file)
    if index is not None:
        write_index(folder, index)
        wrote.append(folder / INDEX)
    return wrote


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def assigned(of_all: Sequence[list[HeldShard]]) -> tuple[list[list[str]], Index]:
    """What each rank writes, and the index. Of the ranks with equal shards, the one with the least to write writes
    them.
    """
    holders: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    described: dict[tuple[str, tuple[int, ...]], HeldShard] = {}
    held_by: dict[tuple[int, str, tuple[int, ...]], HeldShard] = {}
    for rank, held in enumerate(of_all):
        for each in held:
            holders[each.name, each.offset].append(rank)
            described[each.name, each.offset] = held_by[rank, each.name, each.offset] = each
    names: list[list[str]] = [[] for _ in of_all]
    loads = [0] * len(of_all)
    blocks: dict[str, list[StoredBlock]] = defaultdict(list)
    for key, ranks in holders.items():
        each = described[key]
        writer = min(ranks, key=lambda rank: loads[rank])
        loads[writer] += prod(each.shape) * each.dtype.itemsize
        mine = held_by[writer, each.name, each.offset]
        names[writer].append(mine.entry)
        blocks[each.name].append(StoredBlock(file_of(writer), each.offset, each.shape, mine.number))
    wholes = {name: (each.dtype, each.whole) for (name, _), each in described.items()}
    for name, (_, whole) in wholes.items():
        if sum(prod(block.shape) for block in blocks[name]) != prod(whole):
            raise AssertionError(f"the ranks do not hold the whole of {name}, or some of it twice: {blocks[name]}")
    return names, {name: StoredTensor(*wholes[name], tuple(blocks[name])) for name in wholes}


def read_blocks(checkpoint: Path, index: Index, wanted: Mapping[str, Shard]) -> None:
    """Fill shards from any stored blocks. Only the needed parts of each file are read."""
    by_file: dict[str, list[tuple[str, StoredBlock, Shard]]] = defaultdict(list)
    for name, shard in wanted.items():
        for piece in shard.pieces():
            for block in index[name].blocks:
                if all(start < end for start, end in _overlap(block, piece)):
                    by_file[block.file].append((name, block, piece))
    for file, blocks in by_file.items():
        try:
            with safe_open(checkpoint / file, "pt") as opened:
                for name, block, piece in blocks:
                    _check_header(opened, name, block, index[name].dtype)
                    _copy(opened, name, block, piece)
        except SafetensorError as error:
            raise UserError(f"{checkpoint / file} is damaged, or not a safetensors file: {error}") from None


def _check_header(opened: safe_open, name: str, block: StoredBlock, dtype: torch.dtype) -> None:
    stored = opened.get_slice(block.entry(name))
    there, here = (stored.get_dtype(), stored.get_shape()), (CODES[dtype], list(block.shape))
    if there != here:
        raise SafetensorError(f"{name} is {there} there, and {here} in {INDEX}")


def _copy(opened: safe_open, name: str, block: StoredBlock, shard: Shard) -> None:
    overlap = _overlap(block, shard)
    target = shard.local[_within(overlap, shard.offset)]
    # safetensors cannot slice a tensor without dimensions.
    entry = block.entry(name)
    target.copy_(opened.get_slice(entry)[_within(overlap, block.offset)] if block.shape else opened.get_tensor(entry))


def _overlap(block: StoredBlock, shard: Shard) -> list[tuple[int, int]]:
    """The overlap in the whole tensor; empty if a start is not before its end."""
    sides = zip(block.offset, block.shape, shard.offset, shard.local.shape, strict=True)
    return [(max(a, b), min(a + m, b + n)) for a, m, b, n in sides]


def _within(overlap: list[tuple[int, int]], offset: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(start - begin, end - begin) for (start, end), begin in zip(overlap, offset, strict=True))
