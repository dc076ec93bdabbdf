"""Makespans, bubbles and memory are those that the papers derive. B = 2F and free messages unless said."""

from __future__ import annotations

import pytest

from cubeloom.base.divisors import divisors
from cubeloom.pipeline import Costs, Schedule, Timeline, generate, simulate
from grids import rest_is_long

EVEN = range(2, 33, 2)
PAIRS = [(stages, pairs) for stages in EVEN for pairs in divisors(stages // 2)]


def equal_slots(schedule: Schedule) -> Timeline:
    """The paper's tables count F and B as one slot each."""
    return simulate(schedule, Costs.uniform(schedule.stages, 1.0, 0.5, 0.5))


def test_the_table_of_d_8_n_8() -> None:
    got = {name: simulate(generate(name, 8, 8)).makespan for name in ("1f1b", "chimera", "zb-h1", "chimera-zb")}
    assert got == {"1f1b": 45, "chimera": 36, "zb-h1": 31, "chimera-zb": 27}
    assert simulate(generate("chimera", 8, 8)).ideal == 24


@pytest.mark.parametrize(("stages", "pairs"), PAIRS)
def test_chimera_s_table_3(stages: int, pairs: int) -> None:
    """Bubbles (D-2f)/(2fN+D-2f), 2f copies of the weights, activations from D-D/(2f)+1 to D; f = 1 is table 2."""
    timeline = equal_slots(generate("chimera", stages, stages, pairs=pairs))
    bubble = (stages - 2 * pairs) / (2 * pairs * stages + stages - 2 * pairs)
    assert timeline.bubble_ratio == pytest.approx([bubble] * stages)
    assert timeline.weight_copies == 2 * pairs
    assert min(timeline.peak_activations) == stages - stages // (2 * pairs) + 1
    assert max(timeline.peak_activations) == stages


@pytest.mark.parametrize(("stages", "pairs"), PAIRS)
def test_chimera_s_units_fit_into_each_other(stages: int, pairs: int) -> None:
    """With equal slots direct concatenation adds 2D slots a unit and no bubble, for table 3's ratio at any N = KD."""
    timeline = equal_slots(generate("chimera", stages, 3 * stages, pairs=pairs))
    assert timeline.makespan == 3 * 2 * stages + (stages - 2 * pairs) // pairs
    assert max(timeline.peak_activations) == stages


@pytest.mark.parametrize("stages", [4, 6, 8, 16, pytest.param(32, marks=pytest.mark.long)])
@pytest.mark.parametrize("units", [1, 2, 4, 6])
def test_chimera_s_three_ways(stages: int, units: int) -> None:
    """Section 1.2 of the reference."""
    n = stages * units
    direct = simulate(generate("chimera", stages, n))
    assert direct.makespan == units * (4 * stages - 2) + stages - 2
    assert (min(direct.peak_activations), max(direct.peak_activations)) == (stages / 2 + 1, stages)
    halving = simulate(generate("chimera", stages, n, mode="halving"))
    assert halving.makespan == 3 * n + 0.75 * stages - 1.5
    assert max(halving.peak_activations) <= stages
    if units % 2 == 0:
        doubling = simulate(generate("chimera", stages, n, mode="doubling"))
        assert doubling.makespan == 3 * n + 1.5 * stages - 3
        assert (min(doubling.peak_activations), max(doubling.peak_activations)) == (1.5 * stages + 1, 2 * stages)


@pytest.mark.parametrize(("stages", "makespans"), [(8, {1: 36, 2: 28, 4: 24}), (16, {1: 76, 2: 60, 4: 52, 8: 48})])
def test_more_pairs_of_pipelines_leave_fewer_bubbles(stages: int, makespans: dict[int, float]) -> None:
    got = {f: simulate(generate("chimera", stages, stages, pairs=f)).makespan for f in makespans}
    assert got == makespans


@pytest.mark.parametrize("stages", rest_is_long(EVEN, [2, 4, 6, 8, 16]))
def test_split_backward_leaves_the_middle_workers_wait_only(stages: int) -> None:
    """T = 3N + D/2 - 1 with no more than D activations, for N = D, 2D and 4D."""
    for n in (stages, 2 * stages, 4 * stages):
        timeline = simulate(generate("chimera-zb", stages, n))
        assert timeline.makespan == 3 * n + stages / 2 - 1
        assert max(timeline.peak_activations) <= stages


@pytest.mark.parametrize("stages", rest_is_long([2, 4, 6, 8, 10, 12], [2, 4, 6]))
def test_split_backward_does_so_for_every_n_from_d_up(stages: int) -> None:
    for n in range(stages, 3 * stages + 1):
        assert simulate(generate("chimera-zb", stages, n)).makespan == 3 * n + stages / 2 - 1


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("n", [16, 24])
def test_the_peers(stages: int, n: int) -> None:
    for name in ("gpipe", "1f1b"):
        timeline = simulate(generate(name, stages, n))
        assert timeline.makespan == 3 * (n + stages - 1)
        assert timeline.bubble_ratio == pytest.approx([(stages - 1) / (n + stages - 1)] * stages)
        peaks = [n] * stages if name == "gpipe" else [stages - r for r in range(stages)]
        assert list(timeline.peak_activations) == peaks
    zb1 = simulate(generate("zb-h1", stages, n))
    assert zb1.makespan == 3 * n + stages - 1
    assert set(zb1.peak_activations) == {stages}


@pytest.mark.parametrize(("workers", "n"), [(4, 8), (8, 16), (8, 32), (16, 64)])
@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaving_divides_the_bubble(workers: int, n: int, chunks: int) -> None:
    timeline = simulate(generate("interleaved", workers, n, chunks=chunks))
    assert timeline.makespan == 3 * n + 3 * (workers - 1) / chunks
    assert timeline.peak_activations[0] == pytest.approx(workers + (workers - 1) / chunks)


@pytest.mark.parametrize(("workers", "n"), [(2, 8), (4, 8), (8, 16), (8, 20)])
def test_no_bubble_inside_the_span_of_a_worker(workers: int, n: int) -> None:
    """Zero-bubble papers count from a worker's first action to its last."""
    for name, peak in (("zb-h2", 2 * workers - 1), ("zbv", workers)):
        timeline = simulate(generate(name, workers, n))
        assert {row[-1].end - row[0].start for row in timeline.spans} == {3 * n}
        assert set(timeline.peak_activations) == {peak}


@pytest.mark.parametrize(
    ("name", "n", "makespan"), [("zb-h2", 16, 55), ("zbv", 16, 51.5), ("dualpipe", 16, 51), ("dualpipev", 16, 51.5)]
)
def test_eight_workers(name: str, n: int, makespan: float) -> None:
    assert simulate(generate(name, 8, n)).makespan == makespan


@pytest.mark.parametrize(("stages", "n"), [(4, 8), (8, 16), (8, 20), (16, 32)])
def test_dualpipe_s_memory(stages: int, n: int) -> None:
    timeline = simulate(generate("dualpipe", stages, n))
    assert set(timeline.peak_activations) == {stages + 1}
    assert timeline.weight_copies == 2
    assert simulate(generate("dualpipev", stages // 2, n)).weight_copies == 1


@pytest.mark.parametrize("stages", EVEN)
def test_gems_takes_2d_plus_1_for_each_micro_batch(stages: int) -> None:
    timelines = [simulate(generate("gems", stages, n)) for n in (7, 8)]
    assert timelines[1].makespan - timelines[0].makespan == 2 * stages + 1
    assert set(timelines[1].peak_activations) == {1}
    assert timelines[1].weight_copies == 2


@pytest.mark.parametrize(("workers", "ratios"), [(4, (0.333, 0.213, 0.119)), (8, (0.368, 0.238, 0.135))])
def test_hanayo_s_waves(workers: int, ratios: tuple[float, ...]) -> None:
    for waves, ratio in zip((1, 2, 4), ratios, strict=True):
        timeline = simulate(generate("hanayo", workers, workers, chunks=2 * waves))
        assert timeline.bubble_ratio[0] == pytest.approx(ratio, abs=5e-4)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_without_a_flush_the_bubble_is_paid_once(stages: int) -> None:
    for name in ("pipedream", "pipedream-2bw"):
        short, long = (simulate(generate(name, stages, n * stages)) for n in (4, 40))
        assert long.makespan - short.makespan == 3 * 36 * stages
    assert simulate(generate("pipedream", stages, 4 * stages)).weight_copies == stages
    assert simulate(generate("pipedream-2bw", stages, 4 * stages)).weight_copies == 2
