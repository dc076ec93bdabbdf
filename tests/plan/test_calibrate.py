"""Measuring this machine: what ranks bring back, what is made of it, and the file that others load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cubeloom.base.errors import UserError
from cubeloom.cli.calibrate import Calibrate, slowest
from cubeloom.comm import devices
from cubeloom.launch import RankPool
from cubeloom.plan.costs import all_reduce, matmul, send
from cubeloom.plan.hardware import cluster, device
from cubeloom.plan.hardware.calibrate import fitted_cluster, fitted_device, missed_transfers
from cubeloom.plan.hardware.device import Dtype
from cubeloom.plan.hardware.measure import measure_device
from cubeloom.plan.hardware.measure_links import measure_links
from cubeloom.plan.hardware.measured import DeviceMeasurements, Transfer, undisturbed

GPU = replace(
    device("h200"), matmul_fraction=1.0, bandwidth_fraction=1.0, tile_rows=128, tile_columns=128, launch=2e-6, host=8e-6
)
SHAPES = [(m, n, k) for m in (256, 1000, 1500, 4096, 5000) for n in (512, 1100, 8192) for k in (1024, 8192)]
WHOLE = (8448, 8192, 8192)  # 4,224 tiles: 32 waves of 132
DTYPES: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")


def found() -> DeviceMeasurements:
    """As if measured on a device that is just as its closed form says."""
    products = {d: {(m, n, k): float(matmul(GPU, m, n, k, d)) for m, n, k in (*SHAPES, WHOLE)} for d in DTYPES}
    return DeviceMeasurements(
        what="a GPU", processors=132, memory=10**11, products=products, bandwidth=4.8e12, launch=2e-6, host=8e-6
    )


def test_a_device_is_found_again() -> None:
    made, missed = fitted_device("mine", found(), "a test")
    assert missed < 0.05
    assert (made.tile_rows, made.tile_columns) == (128, 128)
    assert made.bf16 == pytest.approx(GPU.bf16, rel=0.02)
    assert made.fp32 == pytest.approx(GPU.fp32, rel=0.02)
    assert (made.memory, made.bandwidth, made.launch, made.host) == (10**11, 4.8e12, 2e-6, 8e-6)
    assert {fact.confidence for fact in made.facts.values()} == {"measured"}


def test_a_cluster_is_found_again() -> None:
    truth = replace(
        cluster("one-machine"),
        devices_per_node=8,
        link_bandwidth=2e9,
        pair_bandwidth=1.5e9,
        link_latency=2e-5,
        start=1e-4,
    )
    transfers = [
        Transfer("all_reduce", group, size, float(all_reduce(truth, size, group, algorithm="ring")))
        for group in (2, 4, 8)
        for size in (64, 2**12, 2**26)
    ]
    transfers += [Transfer("send", 2, size, float(send(truth, size, 2))) for size in (64, 2**26)]
    made = fitted_cluster("mine", GPU, 8, transfers, "a test", crowd=0.2)
    for name in ("link_bandwidth", "pair_bandwidth", "link_latency", "start"):
        assert getattr(made, name) == pytest.approx(getattr(truth, name), rel=0.05), name
    assert made.facts["link_bandwidth"].confidence == "measured"
    assert made.facts["nic_bandwidth"].confidence == "estimated"
    missed = missed_transfers(made, transfers)
    assert missed is not None
    assert missed < 0.05


def test_noise_makes_no_latency_negative() -> None:
    transfers = [Transfer("all_reduce", group, size, 1e-3 + size / 1e9) for group in (2, 4) for size in (64, 2**20)]
    made = fitted_cluster("mine", GPU, 4, [*transfers, Transfer("send", 2, 64, 9e-3)], "a test", crowd=0.2)
    assert made.start >= 0
    assert made.link_latency > 0


def test_one_device_alone_has_no_link_to_measure() -> None:
    made = fitted_cluster("mine", GPU, 1, [], "a test", crowd=0.2)
    assert made.facts["link_bandwidth"].confidence == "estimated"
    assert missed_transfers(made, []) is None


def test_what_others_do_meanwhile_counts_less() -> None:
    assert undisturbed([1.0, 1.0, 9.0, 9.0, 9.0]) == 1.0
    assert undisturbed([2.0]) == 2.0


def test_a_collective_lasts_as_long_as_its_slowest_rank() -> None:
    fast, slow = (Transfer("send", 2, 8, seconds) for seconds in (1.0, 2.0))
    assert slowest([[fast, slow], [slow, fast]]) == [slow, slow]


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_ranks_measure_themselves(ranks: RankPool) -> None:
    (core,) = ranks.run(1, measure_device, devices.CPU, {"fp32": ((64, 64, 64),), "bf16": ((32, 64, 32),)}, 0.01)
    assert core.processors == 1
    assert core.memory > 2**20
    assert core.host == 0
    numbers = [core.bandwidth, core.launch, core.products["fp32"][64, 64, 64], core.products["bf16"][32, 64, 32]]
    assert all(number > 0 for number in numbers)

    by_rank = ranks.run(3, measure_links, devices.CPU, 3, (100, 3000), 2)
    seen = slowest(by_rank)
    assert [(each.operation, each.nbytes) for each in seen] == [
        (operation, nbytes) for nbytes in (96, 3000) for operation in ("all_reduce", "all_gather", "send")
    ]
    assert all(each.group == 3 and each.seconds > 0 for each in seen)


@pytest.mark.timeout(120)
def test_the_command_writes_what_can_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    assert Calibrate(output=path, name="mine", device=devices.CPU, quick=True, json=True)() == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    loaded = cluster(path)
    assert loaded.device == device(path)
    assert loaded.name == loaded.device.name == said["name"] == "mine"
    assert loaded.device.fp32 == said["fp32"] > 0
    assert said["seconds"] > 0


def test_a_folder_that_is_not_there_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(RankPool, "run", None)
    with pytest.raises(UserError, match="no folder"):
        Calibrate(output=tmp_path / "nowhere" / "mine.toml")()
    if not devices.available("cuda"):
        with pytest.raises(UserError, match="torch sees none here"):
            Calibrate(device="cuda")()


@pytest.mark.parametrize("ranks", [0, 2])
def test_only_gpus_are_shared(ranks: int) -> None:
    with pytest.raises(UserError, match="on a CPU each has its core"):
        Calibrate(device="cpu", share_gpu=ranks)()
