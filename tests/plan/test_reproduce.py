"""`cubeloom reproduce`: published figures as the references have them, ours as predictions, and what they must agree in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cubeloom.base.errors import UserError
from cubeloom.cli.reproduce import Reproduce
from cubeloom.pipeline import generate
from cubeloom.plan.hardware import cluster
from cubeloom.plan.model import load
from cubeloom.plan.reproduce import PAPERS, Report, chimera, cube, page, published, reproduce
from cubeloom.plan.reproduce.block import panels
from cubeloom.plan.reproduce.calibration import Calibrated
from cubeloom.plan.reproduce.equation import critical_path
from cubeloom.plan.reproduce.pipelines import fits, run, stages
from cubeloom.plan.reproduce.report import Point
from cubeloom.plan.reproduce.unet import as_tensor3d
from cubeloom.tools.baselines import summa_words
from pages.data import Page

GPT2, BERT = "GPT-2, 2,048 P100", "Bert-48, 64 P100"
PRINTED = {
    "cube": {"64 V100: 3-D over 1-D": 2.32, "64 V100: 3-D over 2-D": 1.57},
    "chimera": {
        f"{GPT2}: Chimera over PipeDream": 2.01,
        f"{GPT2}: Chimera over PipeDream-2BW": 1.16,
        f"{GPT2}: Chimera over GPipe": 1.42,
        f"{GPT2}: Chimera over GEMS": 2.34,
        f"{GPT2}: Chimera over DAPPLE": 1.38,
        f"{GPT2}: Chimera, sequences/s": 505,
        f"{GPT2}: GPipe, bubble ratio": 0.45,
        f"{GPT2}: GEMS, bubble ratio": 0.83,
        f"{GPT2}: DAPPLE, bubble ratio": 0.49,
        f"{GPT2}: Chimera, bubble ratio": 0.32,
        f"{BERT}: Chimera, sequences/s": 340,
        f"{BERT}: PipeDream-2BW, sequences/s": 290,
        "GPT-2: Chimera, weak scaling from 512 to 2,048 nodes": 0.914,
        "Bert-48, 32 P100: the W that equation 1 chooses": 8,
        "Bert-48, 32 P100: the D that equation 1 chooses": 4,
        "Bert-48, 32 P100: the B that equation 1 chooses": 8,
    },
    "tensor3d": {
        "28B U-Net, 256 A100: over Megatron-LM": 1.60,
        "80B GPT, 1,024 A100: over Megatron-LM": 1.26,
        "80B GPT, 1,024 A100: share of peak": 0.57,
    },
}


@pytest.fixture(scope="module")
def model() -> Calibrated:
    return chimera.calibrated()


@pytest.fixture(scope="module")
def reports(model: Calibrated) -> dict[str, Report]:
    return {
        paper: chimera.reproduce(model) if paper == "chimera" else reproduce(paper) for paper in PAPERS
    }  # calibrated once


def ours(report: Report) -> dict[str, float]:
    return {row.point.name: row.ours for row in report.rows}


@pytest.mark.slow
@pytest.mark.parametrize("paper", PAPERS)
def test_rows_have_the_published_figures(reports: dict[str, Report], paper: str) -> None:
    found = {row.point.name: row.point.value for row in reports[paper].rows}
    assert len(found) == len(reports[paper].rows)
    assert found.items() >= PRINTED[paper].items()
    assert all(row.point.source and row.ours >= 0 for row in reports[paper].rows)


class TestCalibration:
    def test_only_marked_points_calibrate(self, reports: dict[str, Report]) -> None:
        marked = {paper: [row.point for row in report.rows if row.calibrated] for paper, report in reports.items()}
        assert marked["cube"] == marked["tensor3d"] == []
        assert set(marked["chimera"]) == set(chimera.CALIBRATION.values())
        assert len(marked["chimera"]) == 3

    def test_marked_points_are_met(self, reports: dict[str, Report]) -> None:
        for row in reports["chimera"].rows:
            if row.calibrated:
                assert row.ours == pytest.approx(row.point.value, rel=2e-3), row.point.name

    def test_no_other_figure_changes_ours(
        self, model: Calibrated, reports: dict[str, Report], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is published of a prediction stands beside it and nowhere else."""
        tables = ("GPT2_SPEEDUP", "GPT2_RATE", "GPT2_BUBBLE", "GPT2_AGAIN", "BERT_SPEEDUP", "BERT_AGAIN", "EAGER_OPT")
        for name in tables:
            wrong = {key: replace(point, value=7 * point.value + 1) for key, point in getattr(published, name).items()}
            monkeypatch.setattr(published, name, wrong)
        assert ours(chimera.reproduce(model)) == ours(reports["chimera"])

    def test_a_marked_figure_does(self, model: Calibrated) -> None:
        slower = {**chimera.CALIBRATION, "network": Point("half", 83.0, "made up")}
        changed = chimera.calibrated(slower)
        assert changed.cluster.nic_bandwidth < model.cluster.nic_bandwidth / 2
        assert changed.growth == model.growth


class TestChimera:
    def test_schemes_stand_in_the_published_order(self, reports: dict[str, Report]) -> None:
        """Chimera is the fastest and GEMS the slowest, in both experiments."""
        found = ours(reports["chimera"])
        for where in (GPT2, BERT):
            assert all(found[f"{where}: Chimera over {scheme}"] > 1 for scheme in published.SCHEMES)
            rates = {s: found[f"{where}: {s}, sequences/s"] for s in (*published.SCHEMES, "Chimera")}
            assert min(rates, key=lambda scheme: rates[scheme]) == "GEMS"

    def test_speedups_are_near(self, reports: dict[str, Report]) -> None:
        """A third, which is what the page says of the worst; a change of the model that moves them further is to be seen."""
        for row in reports["chimera"].rows:
            if ": Chimera over" in row.point.name:
                assert abs(row.difference) < 1 / 3, row.point.name

    def test_recomputes_where_the_paper_does(self, reports: dict[str, Report]) -> None:
        rows = [row for row in reports["chimera"].rows if row.point.name.endswith("recomputes")]
        assert len(rows) == 12
        assert all(row.ours == row.point.value for row in rows)

    def test_equation_1_chooses_as_the_paper(self, model: Calibrated) -> None:
        best = chimera.choice(model)[0].setup
        assert (best.width, best.depth, best.size) == (8, 4, 8)

    def test_its_choice_needs_no_calibrated_time(self, model: Calibrated) -> None:
        best = chimera.choice(replace(model, cluster=cluster("piz-daint")))[0].setup
        assert (best.width, best.depth, best.size) == (8, 4, 8)

    @pytest.mark.parametrize("stages", [4, 6, 8, 16])
    def test_critical_path_of_the_basic_unit(self, stages: int) -> None:
        forwards, backwards = critical_path(generate("chimera", stages, stages))
        assert forwards == pytest.approx(stages, abs=1e-3)
        assert backwards == pytest.approx(2 * stages - 2, abs=1e-3)

    def test_bubble_ratios_are_those_of_table_2(self, reports: dict[str, Report]) -> None:
        found = ours(reports["chimera"])
        assert found[f"{GPT2}: GPipe, bubble ratio"] == pytest.approx(7 / 15)
        assert found[f"{GPT2}: DAPPLE, bubble ratio"] == pytest.approx(15 / 31)
        assert found[f"{GPT2}: Chimera, bubble ratio"] == pytest.approx(30 / 94)

    def test_gems_has_the_largest_microbatch_that_fits(self, model: Calibrated) -> None:
        setup = chimera.gpt2(2048)["GEMS"]
        assert fits(setup, model.cluster, model.growth)
        assert not fits(replace(setup, size=2 * setup.size), model.cluster, model.growth)

    def test_seconds_make_the_step(self, model: Calibrated) -> None:
        for setup in (*chimera.gpt2(512).values(), *chimera.bert(16).values()):
            found = run(setup, model.cluster, model.growth)
            assert found.computed + found.waited + found.summed + found.update == pytest.approx(found.seconds)

    def test_stages_hold_the_whole_model(self) -> None:
        weights = stages(chimera.gpt2(2048)["Chimera"], cluster("piz-daint"), 2, recompute=False).weights
        assert sum(weights) / 4 == 1_389_327_360  # the paper's table 4

    def test_weights_take_sixteen_bytes_a_number(self) -> None:
        """Weight, gradient and Adam's two moments in float32; where activations take no room."""
        setup, piz_daint = chimera.gpt2(2048)["DAPPLE"], cluster("piz-daint")
        largest = max(stages(setup, piz_daint, 1, recompute=False).weights)
        assert run(setup, piz_daint, 1e-12, recompute=False).memory == pytest.approx(4 * largest)

    def test_a_batch_of_broken_microbatches_is_refused(self, model: Calibrated) -> None:
        setup = replace(chimera.bert(32)["DAPPLE"], batch=100)
        with pytest.raises(UserError, match="nearest is 96"):
            run(setup, model.cluster, model.growth)

    def test_stages_that_cannot_be_equal_are_refused(self, model: Calibrated) -> None:
        setup = replace(chimera.bert(40)["DAPPLE"], depth=5, width=8, batch=32)
        with pytest.raises(UserError, match="48 blocks cannot be cut into 5"):
            run(setup, model.cluster, model.growth)


class TestCube:
    def test_the_headlines_are_ratios_of_the_tables_averages(self) -> None:
        one, two, three = (row.average for row in published.CUBE if row.ranks == 64)
        assert one / three == pytest.approx(published.CUBE_OVER_1D.value, abs=5e-3)
        assert two / three == pytest.approx(published.CUBE_OVER_2D.value, abs=5e-3)

    def test_only_the_decisive_row_contradicts_itself(self) -> None:
        found = [abs((row.forward + row.backward) / row.samples / row.average - 1) for row in published.CUBE]
        assert [row[:2] for row, off in zip(published.CUBE, found, strict=True) if off > 2e-3] == [("3-D", 64)]

    def test_a_row_of_each_run_and_pass(self, reports: dict[str, Report]) -> None:
        names = [row.point.name for row in reports["cube"].rows]
        for row in published.CUBE:
            assert sum(f"{row.scheme}, {row.ranks} GPUs:" in name for name in names) == 3

    def test_a_figure_of_the_table_changes_nothing_of_ours(self) -> None:
        """Sizes are taken from it, and no times."""
        row = published.CUBE[3]
        wrong = row._replace(forward=1.0, backward=2.0, average=3.0)
        here = cube.machine("longhorn")
        assert cube.simulated(wrong, here) == cube.simulated(row, here)

    def test_a_network_of_the_implied_rate_gives_the_published_forward(self) -> None:
        row = published.CUBE[0]
        here = replace(
            cube.machine("frontera-rtx"), start=0.0, link_latency=0.0, nic_latency=0.0, eager_fraction=0.0
        )  # what is left is bytes
        rate = cube.implied(row, cube.simulated(row, here), here)
        again = cube.simulated(row, replace(here, nic_bandwidth=rate))
        assert again.forward == pytest.approx(row.forward, rel=1e-6)

    @pytest.mark.parametrize("scheme", cube.SCHEMES)
    def test_nothing_runs_behind_a_collective(self, scheme: str) -> None:
        """What is computed is the same on a network a tenth as fast."""
        row = next(row for row in published.CUBE if row.scheme == scheme and row.ranks == 64)
        fast = cube.machine("longhorn")
        spent = [cube.simulated(row, each) for each in (fast, replace(fast, nic_bandwidth=fast.nic_bandwidth / 10))]
        assert spent[1].total > 2 * spent[0].total
        assert spent[1].total - spent[1].waited == pytest.approx(spent[0].total - spent[0].waited)

    def test_equal_machines_have_all_schemes_and_our_plan(self, reports: dict[str, Report]) -> None:
        names = [share.name for share in reports["cube"].shares]
        for machine in ("frontera-rtx", "longhorn"):
            here = [name for name in names if name.startswith(f"{machine}: ")]
            assert [name.split(": ")[1].split(",")[0] for name in here] == ["1-D", "2-D", "3-D", "Cubeloom"]

    def test_more_bytes_take_longer_than_fewer(self) -> None:
        """Without latency: 1-D's ring crosses a node's NIC once, as the two rings of a tile of two by two do together."""
        plain = replace(cube.machine("frontera-rtx"), start=0.0, link_latency=0.0, nic_latency=0.0, eager_fraction=0.0)
        rows = {row.ranks: row for row in published.CUBE if row.scheme == "1-D"}
        spent = cube.simulated(rows[64], plain)
        tokens, hidden = 30 * 512, 8192
        assert spent.forward_waits * plain.nic_bandwidth == pytest.approx(
            cube.LAYERS * 2 * 2 * 63 / 64 * tokens * hidden * 4
        )


def test_summa_moves_what_the_baseline_counts() -> None:
    """Without latency, time is bytes; a ring passes on a rank's own panel too, which it does not receive."""
    q, hidden, rows = 8, 1024, 16 * 64
    plain = replace(
        cube.machine("longhorn"), start=0.0, link_latency=0.0, nic_latency=0.0, eager_fraction=0.0, inner_tiers=(),
        devices_per_node=1, nics=1, nodes=q * q,
    )  # fmt: skip
    for k, n in ((hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)):
        forward, backward = summa_words(rows, k, n, q)
        spent = panels(rows, k, n, q, plain)
        assert spent.waited * plain.nic_bandwidth == pytest.approx(4 * float(2 * forward + backward) * q / (q - 1))


def test_tensor3d_is_faster_than_megatron(reports: dict[str, Report]) -> None:
    found = ours(reports["tensor3d"])
    assert found["28B U-Net, 256 A100: over Megatron-LM"] > 1
    assert found["80B GPT, 1,024 A100: over Megatron-LM"] > 1
    assert 0 < found["80B GPT, 1,024 A100: share of peak"] < 1


def test_res_blocks_all_enter_on_x() -> None:
    cut = as_tensor3d(load("unet-28b"))
    firsts = [layer for kind in cut.kinds for layer in kind.layers if layer.name.endswith("conv1")]
    assert firsts and all(getattr(layer, "side", None) == "x" for layer in firsts)


class TestCommand:
    def test_json(self, reports: dict[str, Report], capsys: pytest.CaptureFixture[str]) -> None:
        assert Reproduce(paper="cube", json=True)() == 0
        out, err = capsys.readouterr()
        found = json.loads(out.splitlines()[-1])
        for row in found["rows"]:
            assert row.keys() >= {"name", "published", "ours", "calibrated"}
        assert {row["name"]: row["ours"] for row in found["rows"]} == ours(reports["cube"])
        assert "Nothing is calibrated" in err

    @pytest.mark.parametrize("paper", PAPERS)
    def test_page_is_well_formed(self, reports: dict[str, Report], paper: str) -> None:
        report = reports[paper]
        drawn = Page(page(report)).data
        rows = {row["name"]: row for plot in drawn["plots"] for row in plot["rows"]}
        assert rows.keys() == set(report.plotted)
        assert {name: row["ours"] for name, row in rows.items()} == {
            row.point.name: row.ours for row in report.rows if row.point.name in report.plotted
        }
        assert drawn["seconds"] == {share.name: share.seconds for share in report.shares}
        # Ratios have a scale of their own, with a line at one.
        assert all(plot["one"] is all(" over " in row["name"] for row in plot["rows"]) for plot in drawn["plots"])

    def test_page_is_written(self, tmp_path: Path) -> None:
        assert Reproduce(paper="cube", html=tmp_path / "cube.html")() == 0
        assert (tmp_path / "cube.html").read_text().startswith("<!doctype html>")

    def test_no_folder_for_the_plot(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="no folder"):
            Reproduce(paper="cube", html=tmp_path / "nowhere" / "cube.html")()
