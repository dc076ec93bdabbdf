"""Each thing that can be wrong with a machine is found, and said with what to do; a sound machine is said to be sound."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cubeloom.tools.doctor import Facts, Severity, examine
from cubeloom.tools.doctor.checks import CHECKS, TESTED
from cubeloom.tools.doctor.environment_checks import relevant
from cubeloom.tools.doctor.facts import Clocks, Room

from .made_up import DEVICES, FACTS, GIB, GPU, LINKS, MACHINE

ROOT = Path(__file__).parent.parent.parent


def test_nothing_is_wrong_with_a_sound_machine() -> None:
    assert {finding.severity for finding in examine(FACTS)} == {"fine"}
    for check in CHECKS:
        assert list(check(FACTS)), check.__name__


def machine(**changes: Any) -> Facts:
    return replace(FACTS, machine=replace(MACHINE, **changes))


def versions(**changes: str | None) -> Facts:
    return replace(FACTS, versions={**FACTS.versions, **changes})


def devices(**changes: Any) -> Facts:
    return replace(FACTS, devices=replace(DEVICES, **changes))


def links(**changes: Any) -> Facts:
    return replace(FACTS, links=(replace(LINKS, **changes),))


def variables(**changes: str) -> Facts:
    return replace(FACTS, variables={**FACTS.variables, **changes})


def room(path: str, free: int) -> Room:
    return Room(path=path, total=100 * GIB, free=free)


@pytest.mark.parametrize(
    ("facts", "severity", "subject", "words"),
    [
        (versions(python="3.10.2"), "wrong", "versions", "3.11 or later"),
        (versions(einops=None), "wrong", "versions", "pip install einops"),
        (versions(torch=None), "wrong", "versions", "pip install torch"),
        (versions(torch="2.9.1"), "wrong", "versions", "torch 2.9.1 is too old"),
        (versions(torch="2.14.0"), "doubtful", "versions", "newer than any"),
        (versions(torch="3.0"), "doubtful", "versions", "newer than any"),
        (devices(accelerators=(), runtime=None), "wrong", "devices", "build for the CPU"),
        (devices(accelerators=()), "wrong", "devices", "sees none"),
        (
            devices(accelerators=(*[GPU] * 3, replace(GPU, memory_free=GIB))),
            "doubtful",
            "devices",
            "GPU 3: more than a quarter",
        ),
        (
            devices(accelerators=(*[GPU] * 3, replace(GPU, name="A100"))),
            "doubtful",
            "devices",
            "unlike GPUs: A100, H200",
        ),
        (devices(accelerators=(GPU,)), "doubtful", "devices", "4 ranks for 1 GPU: some"),
        (machine(cores=2), "doubtful", "cores", "4 ranks for 2 cores"),
        (machine(memory_free=GIB // 2), "wrong", "memory", "128 MiB a rank"),
        (machine(memory_free=2 * GIB), "doubtful", "memory", "512 MiB a rank"),
        (machine(disk=room("/full", 5)), "wrong", "disk", "5 B free of 100 GiB at /full"),
        (machine(disk=room("/full", 5 * GIB)), "doubtful", "disk", "12 bytes a parameter"),
        (machine(shared_memory=None), "doubtful", "shared memory", "no /dev/shm"),
        (machine(shared_memory=room("/dev/shm", 30 << 20)), "wrong", "shared memory", "--shm-size"),
        (machine(shared_memory=room("/dev/shm", 64 << 20)), "doubtful", "shared memory", "--shm-size"),
        (machine(open_files=100), "wrong", "open files", "ulimit -n 65536"),
        (machine(open_files=512), "doubtful", "open files", "ulimit -n 65536"),
        (replace(FACTS, clocks=Clocks(resolution=1e-9, now=0.0)), "wrong", "clocks", "1970-01-01"),
        (replace(FACTS, clocks=Clocks(resolution=0.015, now=1.8e9)), "doubtful", "clocks", "every 15 ms"),
        (links(failure="RankFailed: no answer"), "wrong", "ranks by gloo", "RankFailed: no answer"),
        (links(latency=0.02), "doubtful", "ranks by gloo", "a message takes 20 ms"),
        (links(bandwidth=1e6), "doubtful", "ranks by gloo", "1 MB/s between two ranks"),
        (links(skew=-0.5), "doubtful", "ranks by gloo", "500 ms apart"),
        (links(skew=60.0), "wrong", "ranks by gloo", "60 s apart"),
        (variables(OMP_NUM_THREADS="16"), "doubtful", "environment", "export OMP_NUM_THREADS=4"),
        (variables(OMP_NUM_THREADS="many"), "wrong", "environment", "'many' is not a number"),
        (variables(GLOO_SOCKET_IFNAME="eth"), "wrong", "environment", "GLOO_SOCKET_IFNAME = eth: there is no"),
        (variables(NCCL_SOCKET_IFNAME="=eth"), "wrong", "environment", "this machine has lo, eth0, ib0"),
        (variables(CUDA_VISIBLE_DEVICES=""), "wrong", "environment", "hides every GPU"),
        (variables(NCCL_P2P_DISABLE="1"), "doubtful", "environment", "through the host's memory"),
        (variables(CUDA_LAUNCH_BLOCKING="1"), "doubtful", "environment", "nothing overlaps"),
        (variables(NCCL_BLOCKING_WAIT="1"), "doubtful", "environment", "TORCH_NCCL_BLOCKING_WAIT"),
        (variables(TORCH_DISTRIBUTED_DEBUG="DETAIL"), "doubtful", "environment", "DETAIL"),
        (variables(RANK="3"), "wrong", "environment", "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not"),
    ],
)
def test_a_fault_is_found(facts: Facts, severity: Severity, subject: str, words: str) -> None:
    found = [finding for finding in examine(facts) if finding.severity != "fine"]
    assert [(each.severity, each.subject) for each in found] == [(severity, subject)]
    assert words in f"{found[0].what}; {found[0].remedy}"
    assert found[0].remedy


@pytest.mark.parametrize(
    "facts",
    [
        variables(NCCL_SOCKET_IFNAME="eth"),  # NCCL takes a beginning
        variables(NCCL_SOCKET_IFNAME="^lo,docker"),
        variables(GLOO_SOCKET_IFNAME="ib0"),
        variables(NCCL_P2P_DISABLE="0"),
        links(skew=0.2, skew_error=0.3),  # not known well enough to say
        devices(driver=None, runtime=None, accelerators=()),
        replace(variables(CUDA_VISIBLE_DEVICES=""), devices=replace(DEVICES, driver=None, accelerators=())),
        variables(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="a", MASTER_PORT="1234"),
    ],
)
def test_what_is_no_fault(facts: Facts) -> None:
    assert {finding.severity for finding in examine(facts)} == {"fine"}


def test_the_worst_comes_first() -> None:
    bad = replace(machine(cores=2, open_files=100), versions=FACTS.versions)
    assert [finding.severity for finding in examine(bad)][:3] == ["wrong", "doubtful", "fine"]


def test_only_variables_that_matter_are_shown() -> None:
    assert relevant(variables(NCCL_DEBUG="INFO").variables) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "1"}


def test_the_range_of_torch_is_that_of_the_package() -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={TESTED[0][0]}.{TESTED[0][1]}" in needs
    pinned = re.search(r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert TESTED[1] == (int(pinned[1]), int(pinned[2]))
