"""Devices and clusters are data: all load, every number says where it is from, and what is wrong is refused with a hint."""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, replace
from pathlib import Path

import pytest

from cubeloom.base.errors import UserError
from cubeloom.plan.hardware import Cluster, Device, Tier, cluster, clusters, device, devices, written
from cubeloom.plan.hardware.facts import CONFIDENCES, numbers

DEVICES = (
    "p100", "v100", "v100-32", "a100-40", "a100-80", "h100", "h100-500w", "h200", "b200", "gb200", "gb300", "mi250x",
    "mi300x", "rtx-5000", "cpu",
)  # fmt: skip
CLUSTERS = (
    "longhorn", "frontera-rtx", "piz-daint", "perlmutter", "frontier", "dgx-2", "dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200",
    "gb200-nvl72", "gb300-nvl72", "mi300x-8", "one-machine",
)  # fmt: skip


def test_the_names() -> None:
    assert set(devices()) == set(DEVICES)
    assert set(clusters()) == set(CLUSTERS)


def needed(kind: type) -> set[str]:
    """What a file has to give: what has no default."""
    return {name for name, field in numbers(kind).items() if field.default is MISSING}


@pytest.mark.parametrize("name", DEVICES)
def test_every_number_of_a_device_has_a_source_and_a_confidence(name: str) -> None:
    found = device(name)
    assert found.name == name
    assert set(found.facts) >= needed(Device)
    for field, fact in found.facts.items():
        assert fact.source.strip()
        assert fact.confidence in CONFIDENCES
        assert getattr(found, field) == fact.value


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_number_of_a_cluster_has_a_source_and_a_confidence(name: str) -> None:
    found = cluster(name)
    assert found.name == name
    tiers = {f"{kind}.{i}" for kind in ("inner_tiers", "outer_tiers") for i in range(len(getattr(found, kind)))}
    facts = {f"{tier}.{field}" for tier in tiers for field in numbers(Tier)}
    assert needed(Cluster) | facts <= set(found.facts) <= set(numbers(Cluster)) | facts
    assert all(fact.source.strip() and fact.confidence in CONFIDENCES for fact in found.facts.values())


@pytest.mark.parametrize("name", CLUSTERS)
def test_units_are_plain_ones(name: str) -> None:
    """Bytes, seconds and FLOP/s: a number typed in other units is out by a thousand."""
    found = cluster(name)
    assert 1e9 < found.device.fp32 < 2e14
    assert 8e9 < found.device.memory < 3e11
    assert 1e10 < found.device.bandwidth < 1e13
    assert 5e8 < found.nic_bandwidth <= found.nics * found.nic_bandwidth < 1e13
    assert 1e-7 < found.link_latency <= found.nic_latency < 1e-3
    assert 0 < found.device.matmul_fraction <= 1
    assert [tier.devices for tier in found.tiers] == sorted(tier.devices for tier in found.tiers)


def test_a_cluster_knows_its_device_and_its_size() -> None:
    found = cluster("perlmutter")
    assert found.device == device("a100-40")
    assert found.devices == 4 * found.nodes
    assert isinstance(found.devices_per_node, int)


def test_tiers_go_from_the_device_outwards() -> None:
    longhorn = cluster("longhorn")
    assert [tier.devices for tier in longhorn.tiers] == [1, 2, 4]  # device, socket, node
    assert longhorn.tiers[-1].bandwidth == longhorn.nics * longhorn.nic_bandwidth


@pytest.mark.parametrize(
    ("find", "name", "message"),
    [
        (device, "a100", "did you mean a100-"),
        (device, "h300", "did you mean h[12]00"),
        (cluster, "perlmuter", "did you mean perlmutter"),
        (cluster, "zzz", "There are dgx-2, dgx-a100"),
        (cluster, "mine.toml", "no file mine.toml"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(find: type[Device], name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find(name)  # type: ignore[call-arg]


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    machine = replace(cluster("one-machine"), name="mine")
    path = tmp_path / "mine.toml"
    path.write_text(written(machine))
    assert cluster(path) == machine
    assert device(str(path)) == machine.device
    assert cluster(path).facts == machine.facts
    assert tomllib.loads(path.read_text())["cluster"]["device"] == "self"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[device]", "[machine]", r"has no table \[device\]"),
        ("launch = {", "lunch = {", "unknown device entry 'lunch'; did you mean launch"),
        ('confidence = "measured"', 'confidence = "sure"', "confidence = 'sure'; it is one of measured, published"),
        ("processors = { value = 1,", "processors = { value = 0,", "should be a finite number of at least 1"),
        ('"measured" }', '"measured", scatter = -1 }', "scatter = -1 should be a share"),
        ("processors = { value = 1,", "processors = { value = 'one',", "value = 'one' is not a number"),
        ("processors = { value = 1,", "processors = {", "processors should read"),
        ("name = ", "name ", "is not TOML"),
        ('name = "cpu"', "name = 3", "name = 3 should be text"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    right = written(cluster("one-machine"))
    assert old in right
    path = tmp_path / "mine.toml"
    path.write_text(right.replace(old, new))
    with pytest.raises(UserError, match=message):
        device(path)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    lines = written(cluster("one-machine")).splitlines()
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(line for line in lines if not line.startswith("nics =")))
    with pytest.raises(UserError, match="does not say nics; it has to give nodes, devices_per_node"):
        cluster(path)


def test_an_unknown_dtype_is_refused() -> None:
    assert device("h200").peak("bf16") == device("h200").bf16
    with pytest.raises(UserError, match="there are bf16, fp16, fp32"):
        device("a100-80").peak("fp8")
