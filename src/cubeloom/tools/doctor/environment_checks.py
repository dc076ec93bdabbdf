"""Checks of environment variables: those that torch, its backends and the launchers read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cubeloom.base.errors import UserError
from cubeloom.launch.environment import membership
from cubeloom.tools.doctor.facts import Facts
from cubeloom.tools.doctor.findings import Finding, doubtful, fine, wrong

SHOWN = (
    "OMP_",
    "MKL_",
    "NCCL_",
    "GLOO_",
    "CUDA_",
    "TORCH",
    "PYTORCH_",
    "PET_",
    "MASTER_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
)
"""Prefixes of the variables that matter to a job."""

_SLOW = {
    "NCCL_P2P_DISABLE": "GPUs of one machine talk through the host's memory",
    "NCCL_SHM_DISABLE": "GPUs of one machine talk over the network",
    "NCCL_IB_DISABLE": "machines talk over Ethernet though they may have InfiniBand",
    "CUDA_LAUNCH_BLOCKING": "nothing overlaps: every kernel is waited for",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits for every collective, so that none overlaps",
}
_RENAMED = ("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG")
_SUBJECT = "environment"


def relevant(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter, in order."""
    return {name: variables[name] for name in sorted(variables) if name.startswith(SHOWN)}


def environment(facts: Facts) -> Iterator[Finding]:
    found = [
        *_threads(facts),
        *_interfaces(facts),
        *_hidden_devices(facts),
        *_slow(facts.variables),
        *_job(facts.variables),
    ]
    yield from found
    if not any(finding.severity != "fine" for finding in found):
        yield fine(_SUBJECT, "no variable that hurts")


def _threads(facts: Facts) -> Iterator[Finding]:
    text = facts.variables.get("OMP_NUM_THREADS")
    if text is None:
        return  # we start ranks with one thread each
    if not text.isdecimal() or int(text) < 1:
        yield wrong(_SUBJECT, f"OMP_NUM_THREADS = {text!r} is not a number of threads", "export OMP_NUM_THREADS=1")
    elif int(text) * facts.ranks > facts.machine.cores and int(text) > 1:
        yield doubtful(
            _SUBJECT,
            f"OMP_NUM_THREADS = {text} for {facts.ranks} ranks on {facts.machine.cores} cores: they fight for them",
            f"export OMP_NUM_THREADS={max(1, facts.machine.cores // facts.ranks)}",
        )


def _interfaces(facts: Facts) -> Iterator[Finding]:
    have = facts.machine.interfaces
    for name, exact in (("GLOO_SOCKET_IFNAME", True), ("NCCL_SOCKET_IFNAME", False)):
        text = facts.variables.get(name)
        if not text or text.startswith("^"):  # ^ lists interfaces that must not be used
            continue
        exact = exact or text.startswith("=")
        wanted = text.removeprefix("=").split(",")
        if not any(each == prefix or (not exact and each.startswith(prefix)) for each in have for prefix in wanted):
            yield wrong(_SUBJECT, f"{name} = {text}: there is no such interface", f"this machine has {', '.join(have)}")


def _hidden_devices(facts: Facts) -> Iterator[Finding]:
    text = facts.variables.get("CUDA_VISIBLE_DEVICES")
    if text is not None and facts.devices.driver is not None and text.strip() in ("", "-1", "NoDevFiles"):
        yield wrong(_SUBJECT, f"CUDA_VISIBLE_DEVICES = {text!r} hides every GPU", "unset CUDA_VISIBLE_DEVICES")


def _slow(variables: Mapping[str, str]) -> Iterator[Finding]:
    for name, effect in _SLOW.items():
        if variables.get(name, "0") not in ("", "0"):
            yield doubtful(
                _SUBJECT, f"{name} = {variables[name]}: {effect}", f"unset {name}, unless you know why it is set"
            )
    if variables.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield doubtful(
            _SUBJECT,
            "TORCH_DISTRIBUTED_DEBUG = DETAIL: every collective is checked against the others'",
            "unset it once the fault is found",
        )
    for name in _RENAMED:
        if name in variables:
            yield doubtful(
                _SUBJECT, f"{name} is a name that torch no longer likes", f"TORCH_{name} is the one it reads"
            )


def _job(variables: Mapping[str, str]) -> Iterator[Finding]:
    try:
        member = membership(variables)
    except UserError as error:
        yield wrong(_SUBJECT, str(error), "`cubeloom train` would refuse to start")
        return
    if member is not None:
        yield fine(
            _SUBJECT, f"rank {member.rank} of {member.world}, started by {member.by}, which meet at {member.address}"
        )
