"""Blocks of tensors in files: what is written is read back by any other cut, each number once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from cubeloom import UserError
from cubeloom.train.checkpoint import files_of, index_of, read_blocks, read_index
from cubeloom.train.checkpoint.blocks import HeldShard, assigned, write_blocks
from cubeloom.train.checkpoint.shard import Shard


def halves(tensor: Tensor) -> list[Shard]:
    """By rows."""
    middle = len(tensor) // 2
    below = (0,) * (tensor.dim() - 1)
    return [
        Shard.of(tensor[:middle], tuple(tensor.shape), (0, *below)),
        Shard.of(tensor[middle:], tuple(tensor.shape), (middle, *below)),
    ]


def whole(tensor: Tensor) -> Shard:
    return Shard.of(tensor, tuple(tensor.shape), (0,) * tensor.dim())


def written(folder: Path, of_ranks: list[dict[str, Shard]]) -> list[list[str]]:
    """What all ranks write, by this process; gives which names each wrote."""
    held = [
        [
            HeldShard(name, each.local.dtype, each.whole, each.offset, tuple(each.local.shape))
            for name, each in mine.items()
        ]
        for mine in of_ranks
    ]
    names, index = assigned(held)
    for rank, mine in enumerate(of_ranks):
        write_blocks(folder, rank, {name: mine[name] for name in names[rank]}, None if rank else index)
    return names


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_a_tensor_cut_by_rows_is_read_by_columns(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(35).view(5, 7).remainder(2 if dtype is torch.bool else 99).to(dtype)
    first, second = halves(tensor)
    written(tmp_path, [{"t": first}, {"t": second}])
    index = read_index(tmp_path)
    columns = torch.zeros(5, 3, dtype=dtype)
    read_blocks(tmp_path, index, {"t": Shard.of(columns, (5, 7), (0, 2))})
    assert torch.equal(columns, tensor[:, 2:5])
    row = torch.zeros(1, 7, dtype=torch.float64)  # others' digits, as a float32 job reads bfloat16
    read_blocks(tmp_path, index, {"t": Shard.of(row, (5, 7), (3, 0))})
    assert torch.equal(row, tensor[3:4].double())


def test_tensors_without_dimensions_and_without_numbers(tmp_path: Path) -> None:
    written(tmp_path, [{"count": whole(torch.tensor(7)), "none": whole(torch.empty(0, 3))}])
    count = torch.tensor(0)
    read_blocks(tmp_path, read_index(tmp_path), {"count": whole(count), "none": whole(torch.empty(0, 3))})
    assert count == 7


def test_equal_shards_are_written_once_and_by_whoever_has_least_to_write(tmp_path: Path) -> None:
    ranks = [{name: whole(torch.ones(4)) for name in "abcd"} for _ in range(2)]
    assert written(tmp_path, ranks) == [["a", "c"], ["b", "d"]]
    assert files_of(read_index(tmp_path)) == {"rank-00000.safetensors", "rank-00001.safetensors"}
    with safe_open(tmp_path / "rank-00000.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["a", "c"]


def test_a_rank_that_has_nothing_to_write_writes_no_file(tmp_path: Path) -> None:
    written(tmp_path, [{"a": whole(torch.ones(4))}] * 3)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["index.json", "rank-00000.safetensors"]


def test_half_a_tensor_is_never_written() -> None:
    half = HeldShard("a", torch.float32, (4,), (0,), (2,))
    with pytest.raises(AssertionError, match="do not hold the whole of a"):
        assigned([[half]])


def test_only_the_parts_that_are_wanted_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank opens the files that have some of its block, and asks them for no more than that."""
    tensor = torch.arange(8.0).view(4, 2)
    written(tmp_path, [{"t": half} for half in halves(tensor)])
    asked: list[Any] = []

    class Opened:
        def __init__(self, file: Path, _: str) -> None:
            self._file = file

        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *_: object) -> None: ...

        def get_slice(self, name: str) -> Any:
            def take(slices: Any) -> Tensor:
                asked.append((self._file.name, slices))
                return torch.ones([each.stop - each.start for each in slices])

            return type(
                "Slice",
                (),
                {
                    "get_shape": lambda _: [2, 2],
                    "get_dtype": lambda _: "F32",
                    "__getitem__": lambda _, each: take(each),
                },
            )()

    monkeypatch.setattr("cubeloom.train.checkpoint.blocks.safe_open", Opened)
    read_blocks(tmp_path, read_index(tmp_path), {"t": Shard.of(torch.empty(1, 1), (4, 2), (3, 1))})
    assert asked == [("rank-00001.safetensors", (slice(1, 2), slice(1, 2)))]


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "blocks": [{"file": "../rank-00000.safetensors", "offset": [0], "shape": [4]}]},
        {"dtype": "F32", "shape": [4], "blocks": [{"file": "rank-00000.safetensors", "offset": [2], "shape": [4]}]},
        {"dtype": "F32", "shape": [4], "blocks": [{"file": "rank-00000.safetensors", "offset": [0], "shape": [3]}]},
        {"dtype": "F32", "shape": [-4], "blocks": []},
        {"dtype": "F99", "shape": [0], "blocks": []},
        {"dtype": "F32", "shape": [0]},
        [],
        None,
    ],
)
def test_an_index_that_cannot_be_is_refused(tmp_path: Path, entry: object) -> None:
    (tmp_path / "index.json").write_text(json.dumps({"t": entry}))
    with pytest.raises(UserError, match=r"index.json is damaged: it does not describe tensors"):
        read_index(tmp_path)


def test_a_file_that_the_index_is_not_of(tmp_path: Path) -> None:
    written(tmp_path, [{"t": whole(torch.ones(4))}])
    index = read_index(tmp_path)
    written(tmp_path, [{"t": whole(torch.ones(2, 2))}])
    with pytest.raises(UserError, match=r"t is \('F32', \[2, 2\]\) there, and \('F32', \[4\]\) in index.json"):
        read_blocks(tmp_path, index, {"t": whole(torch.empty(4))})
    written(tmp_path, [{"u": whole(torch.ones(4))}])
    with pytest.raises(UserError, match=r"rank-00000.safetensors is damaged"):
        read_blocks(tmp_path, index, {"t": whole(torch.empty(4))})


def test_a_file_without_a_checksum_is_not_read(tmp_path: Path) -> None:
    written(tmp_path, [{"t": whole(torch.ones(4))}])
    with pytest.raises(UserError, match=r"it names rank-00000.safetensors, whose checksums are unknown"):
        index_of(tmp_path, {"files": {"rank-00001.safetensors": ""}})
