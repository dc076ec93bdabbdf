"""Measuring this machine: what ranks bring back, what is made of it, and the file that others load."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from cubeloom.base.errors import UserError
from cubeloom.cli.calibrate import Calibrate, slowest
from cubeloom.comm import devices
from cubeloom.launch import RankPool
from cubeloom.plan.cost_model.compute import optimizer
from cubeloom.plan.costs import all_gather, all_reduce, fused_attention, matmul, memory_bound, send
from cubeloom.plan.hardware import Cluster, Fact, cluster, device, uncertainty
from cubeloom.plan.hardware.calibrate import fitted_cluster, fitted_device
from cubeloom.plan.hardware.device import Dtype
from cubeloom.plan.hardware.measure_rank import Measuring, measure_rank
from cubeloom.plan.hardware.measured import DeviceMeasurements, Transfer, undisturbed
from cubeloom.plan.hardware.uncertainty import RESIDUAL

GPU = replace(
    device("h200"), matmul_fraction=1.0, bandwidth_fraction=1.0, tile_rows=128, tile_columns=128, launch=2e-6, host=8e-6
)
SHAPES = [(m, n, k) for m in (256, 1000, 1500, 4096, 5000) for n in (512, 1100, 8192) for k in (1024, 8192)]
WHOLE = (8448, 8192, 8192)  # 4,224 tiles: 32 waves of 132
DTYPES: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")


HEADS = [(1024, 16, 128), (4096, 16, 128), (1024, 16, 64)]
GPU = replace(GPU, attention_forward=0.5, attention_backward=0.35)


def found() -> DeviceMeasurements:
    """As if measured on a device that is just as its closed form says."""
    products = {d: {(m, n, k): float(matmul(GPU, m, n, k, d)) for m, n, k in (*SHAPES, WHOLE)} for d in DTYPES}
    attention = {}
    for length, heads, features in HEADS:
        forward, backward = fused_attention(GPU, length, features, heads, True)
        attention[length, heads, features] = float(forward) + GPU.launch, float(backward) + GPU.launch
    return DeviceMeasurements(
        what="a GPU",
        processors=132,
        memory=10**11,
        products=products,
        attention=attention,
        attention_dtype="bf16",
        operators={size: float(memory_bound(GPU, size)) for size in (10**8, 10**9)},
        update=(10**8, 32e8 / (0.8 * GPU.bandwidth) + GPU.launch),
        launch=GPU.launch,
        host=8e-6,
    )


def test_a_device_is_found_again() -> None:
    made = fitted_device("mine", found(), "a test")
    assert (made.tile_rows, made.tile_columns) == (128, 128)
    assert made.bf16 == pytest.approx(GPU.bf16, rel=0.02)
    assert made.fp32 == pytest.approx(GPU.fp32, rel=0.02)
    assert (made.memory, made.launch, made.host) == (10**11, 2e-6, 8e-6)
    assert made.bandwidth == pytest.approx(GPU.bandwidth, rel=1e-3)
    assert made.update_fraction == pytest.approx(0.8, rel=1e-3)
    assert made.attention_forward == pytest.approx(0.5, rel=0.03)
    assert made.attention_backward == pytest.approx(0.35, rel=0.03)
    assert {fact.confidence for fact in made.facts.values()} == {"measured"}
    for name in ("matmul_fraction", "bandwidth_fraction", "attention_forward"):
        scatter = made.facts[name].scatter
        assert scatter is not None and scatter < 0.05


def test_an_optimizer_that_is_slower_than_other_operators_takes_longer() -> None:
    plain = replace(GPU, update_fraction=0.0)
    assert float(optimizer(1e9, 4, replace(plain, update_fraction=0.5))) == pytest.approx(
        2 * float(optimizer(1e9, 4, plain)), rel=1e-3
    )


def measured_on(truth: Cluster) -> list[Transfer]:
    """As if measured on a cluster that is just as its closed form says."""
    what = Measuring(
        kind="cpu", nodes=truth.nodes, per_node=truth.devices_per_node, shapes={}, heads=(), patience=0.0,
        sizes=(64, 2**12, 2**26), repeats=1,
    )  # fmt: skip
    return [
        Transfer(name, group, size, float(closed(truth, size, group, stride)), stride)
        for group, stride in what.groups()
        for size in what.sizes
        for name, closed in (
            ("all_reduce", partial(all_reduce, algorithm="ring")),
            ("all_gather", all_gather),
            ("send", send),
        )
    ]


@pytest.mark.parametrize("nodes", [1, 4])
def test_a_cluster_is_found_again(nodes: int) -> None:
    truth = replace(
        cluster("one-machine"),
        nodes=nodes,
        devices_per_node=8,
        link_bandwidth=2e9,
        pair_bandwidth=1.5e9,
        link_latency=2e-5,
        nics=1,
        nic_bandwidth=9e8,
        nic_latency=5e-5,
        start=1e-4,
    )
    drags = {(8, 1): 0.2, (nodes, 8): 0.1} if nodes > 1 else {(8, 1): 0.2}
    made = fitted_cluster("mine", GPU, 8, nodes, measured_on(truth), drags, "a test")
    names = ["nodes", "devices_per_node", "link_bandwidth", "pair_bandwidth", "link_latency", "start"]
    for name in [*names, *(["nic_bandwidth", "nic_latency"] if nodes > 1 else [])]:
        assert getattr(made, name) == pytest.approx(getattr(truth, name), rel=0.05), name
    assert made.link_drag == 0.2
    assert made.nic_drag == (0.1 if nodes > 1 else 0.2)
    assert made.facts["link_bandwidth"].confidence == "measured"
    assert made.facts["nic_bandwidth"].confidence == ("measured" if nodes > 1 else "estimated")
    scatter = made.facts["link_bandwidth"].scatter
    assert scatter is not None and scatter < 0.05


def test_what_scatters_widens_the_interval() -> None:
    made = fitted_device("mine", found(), "a test")
    there = replace(cluster("one-machine"), device=made)
    wide = replace(made, facts={**made.facts, "matmul_fraction": Fact(1.0, "a test", "measured", 0.2)})
    assert uncertainty(replace(there, device=wide), 0.0) == pytest.approx((RESIDUAL**2 + 0.2**2) ** 0.5)
    assert uncertainty(there, 0.0) < uncertainty(replace(there, device=wide), 0.0)


def test_groups_inside_a_node_and_over_nodes() -> None:
    what = partial(Measuring, kind="cpu", shapes={}, heads=(), patience=0.0, sizes=(1,), repeats=1)
    assert list(what(nodes=1, per_node=1).groups()) == []
    assert list(what(nodes=1, per_node=4).groups()) == [(2, 1), (2, 2), (4, 1)]
    assert list(what(nodes=1, per_node=6).groups()) == [(2, 1), (2, 3), (6, 1)]
    assert list(what(nodes=2, per_node=2).groups()) == [(2, 1), (2, 2), (4, 1)]
    assert list(what(nodes=3, per_node=1).groups()) == [(3, 1)]


def test_noise_makes_no_latency_negative() -> None:
    transfers = [Transfer("all_reduce", group, size, 1e-3 + size / 1e9) for group in (2, 4) for size in (64, 2**20)]
    made = fitted_cluster("mine", GPU, 4, 1, [*transfers, Transfer("send", 2, 64, 9e-3)], {}, "a test")
    assert made.start >= 0
    assert made.link_latency > 0


def test_one_device_alone_has_no_link_to_measure() -> None:
    made = fitted_cluster("mine", GPU, 1, 1, [], {}, "a test")
    assert made.facts["link_bandwidth"].confidence == made.facts["link_drag"].confidence == "estimated"
    assert made.facts["link_bandwidth"].scatter is None


def test_what_others_do_meanwhile_counts_less() -> None:
    assert undisturbed([1.0, 1.0, 9.0, 9.0, 9.0]) == 1.0
    assert undisturbed([2.0]) == 2.0


def test_a_collective_lasts_as_long_as_its_slowest_rank() -> None:
    fast, slow = (Transfer("send", 2, 8, seconds) for seconds in (1.0, 2.0))
    assert slowest([[fast, slow], [slow, fast]]) == [slow, slow]


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_ranks_measure_themselves(ranks: RankPool) -> None:
    """Four ranks stand for two nodes of two."""
    what = Measuring(
        kind=devices.CPU,
        nodes=2,
        per_node=2,
        shapes={"fp32": ((64, 64, 64),), "bf16": ((32, 64, 32),)},
        heads=((64, 2, 32),),
        patience=0.01,
        sizes=(96, 3008),
        repeats=2,
    )
    by_rank = ranks.run(4, measure_rank, what)
    core = by_rank[0].device
    assert (core.processors, core.host) == (1, 0)
    assert core.memory > 2**20
    numbers = [core.launch, core.products["fp32"][64, 64, 64], core.products["bf16"][32, 64, 32], core.update[1]]
    assert all(number > 0 for number in (*numbers, *core.operators.values(), *core.attention[64, 2, 32]))
    seen = slowest([each.transfers for each in by_rank])
    operations = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    assert [(each.group, each.rank_stride, each.operation, each.nbytes) for each in seen] == [
        (group, stride, operation, nbytes)
        for group, stride in ((2, 1), (2, 2), (4, 1))
        for nbytes in (96, 3008)
        for operation in operations
    ]
    assert all(each.seconds > 0 for each in seen)
    assert by_rank[0].drags.keys() == {(2, 1), (2, 2), (4, 1)}
    assert all(0 <= share <= 1 for share in by_rank[0].drags.values())


@pytest.mark.long
@pytest.mark.timeout(180)
def test_ranks_that_torchrun_started_measure_their_machine(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "cubeloom", "calibrate"]
    done = subprocess.run([*run, "--quick", "--device", "cpu", "-o", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("measured in") == 1  # rank 0 alone speaks
    made = cluster(path)
    assert (made.nodes, made.devices_per_node) == (1, 2)
    assert made.facts["link_drag"].confidence == "measured" and made.facts["link_bandwidth"].scatter is not None


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
