"""Orders equal those of torch.distributed.pipelining, wherever both know the schedule."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from cubeloom.pipeline import Schedule, from_csv, generate, to_csv

SIZES = [(d, n) for d in (1, 2, 3, 4, 6, 8) for n in (1, 2, 3, 4, 6, 8, 12, 16, 17, 24)]


def flat(ops: Iterable[Iterable[theirs._Action | None]]) -> list[list[str]]:
    """Computations only, an overlapped forward and backward one after the other, as torch runs them by default."""
    rows = []
    for row in ops:
        actions = [action for action in row if action is not None]
        parts = [part for action in actions for part in (action.sub_actions or (action,))]
        rows.append([str(part) for part in parts if re.fullmatch(r"\d+[FBIW]\d+", str(part))])
    return rows


def ours(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in row] for row in schedule.workers]


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
@pytest.mark.parametrize(("name", "torch_name"), [("gpipe", "GPipe"), ("zbv", "ZBVZeroBubble")])
def test_any_number_of_micro_batches(name: str, torch_name: str, stages: int, microbatches: int) -> None:
    assert ours(generate(name, stages, microbatches)) == flat(get_schedule_ops(torch_name, stages, microbatches))


@pytest.mark.parametrize(("stages", "microbatches"), [(d, n) for d, n in SIZES if n >= d])
def test_1f1b(stages: int, microbatches: int) -> None:
    """torch 2.13 prints its last rank's forwards counted from 1, past the last micro-batch; it runs them from 0."""
    *expected, last = flat(get_schedule_ops("1F1B", stages, microbatches))
    recounted = [f"{stages - 1}F{int(text.split('F')[1]) - 1}" if "F" in text else text for text in last]
    assert ours(generate("1f1b", stages, microbatches)) == [*expected, recounted]


@pytest.mark.parametrize(("stages", "microbatches"), [(d, n) for d, n in SIZES if n % max(1, n // d) == 0])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(
    ("name", "torch_name"), [("interleaved", "Interleaved1F1B"), ("zb-h1", "InterleavedZeroBubble")]
)
def test_rounds_of_chunks(name: str, torch_name: str, stages: int, microbatches: int, chunks: int) -> None:
    expected = get_schedule_ops(torch_name, stages, microbatches, num_stages_per_rank=chunks)
    assert ours(generate(name, stages, microbatches, chunks=chunks)) == flat(expected)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_zb1p_with_one_stage_a_rank(stages: int, microbatches: int) -> None:
    """torch builds this class for two chunks or more; its rule for a rank's row takes one as well."""
    pretended = SimpleNamespace(
        n_local_stages=1, microbatches_per_round=microbatches, pp_group_size=stages, _n_microbatches=microbatches
    )
    rule = theirs.ScheduleInterleavedZeroBubble._calculate_single_rank_operations
    expected = [rule(pretended, rank) for rank in range(stages)]  # type: ignore[arg-type]
    assert ours(generate("zb-h1", stages, microbatches)) == flat(expected)


@pytest.mark.parametrize(("stages", "microbatches"), [(d, n) for d, n in SIZES if n >= 2 * d])
def test_dualpipev(stages: int, microbatches: int) -> None:
    expected = get_schedule_ops("DualPipeV", stages, microbatches)
    assert ours(generate("dualpipev", stages, microbatches)) == flat(expected)


def test_torch_reads_our_csv() -> None:
    schedule = generate("zbv", 4, 8)
    text = to_csv(schedule, name_row=False)
    read = [[theirs._Action.from_str(cell) for cell in line.split(",")] for line in text.splitlines()]
    assert flat(read) == ours(schedule)
    assert from_csv(text, name="zbv") == schedule
