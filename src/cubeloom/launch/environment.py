"""Finds out from environment variables which launcher's job this process belongs to.

Nothing is asked of the network: `membership` is a function of the variables alone.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cubeloom.base.errors import UserError

Launcher = Literal["torchrun", "pod", "mpirun", "srun"]
Variables = Mapping[str, str]

_LOCAL = "127.0.0.1"
# Below the ports that Linux gives to outgoing connections (32768 and up), so that none is in use by chance.
_FIRST_PORT, _PORTS = 10_000, 20_000
_STEP = 7919  # a prime: steps of one job are far from each other and from the next jobs' first steps


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A rank's place in a job that another program started."""

    rank: int
    world: int
    local_rank: int
    """The rank among those of this machine, which determines its device."""
    address: str
    """The rendezvous: the machine of rank 0."""
    port: int
    restart: int = 0
    """The number of restarts, as counted by the launcher of this machine. Other machines may count differently."""
    by: Launcher
    """`pod`: one process per machine, as a Kubernetes PyTorchJob without torchrun starts them."""
    hosted: bool = False
    """A process already listens at the port (torchrun's agent); otherwise rank 0 has to."""
    one_machine: bool = False
    """All ranks are on this machine: no other machine has to reach them."""
    agent: bool = False
    """torch's agent started this process, and is its parent."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise UserError(f"{self.by} says that this is rank {self.rank} of {self.world}: ranks count from 0")
        if not 0 <= self.local_rank < self.world:
            raise UserError(f"{self.by} says that this is local rank {self.local_rank} in a job of {self.world}")
        if not 0 < self.port < 1 << 16:
            raise UserError(f"ranks cannot meet at port {self.port}: ports go from 1 to 65535")


def current() -> Variables:
    """The variables of this process."""
    return os.environ


def membership(variables: Variables) -> Membership | None:
    """The job whose launcher started this process as a rank; None if it has to start the ranks itself.

    torchrun comes first, because it may itself run under srun or mpirun; mpirun comes before srun, which it uses to
    start its helpers on a Slurm cluster. If only some variables are set, or if they contradict each other, a UserError
    names them.
    """
    if "RANK" in variables:
        return _by_torch(variables)
    found = _by_mpirun(variables) or _by_srun(variables)
    if found is None:
        _refuse_half_a_job(variables)
        return None
    said = _number(variables, "WORLD_SIZE", found.world)
    if said != found.world:
        raise UserError(f"WORLD_SIZE = {said}, but {found.by} started {found.world} ranks; unset WORLD_SIZE")
    return found


def _by_torch(variables: Variables) -> Membership:
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not variables.get(name)]
    if missing:
        raise UserError(
            f"RANK is set, and {', '.join(missing)} not: a rank of a job needs {', '.join(needed)}. "
            "Start with torchrun, or unset RANK to start the ranks on this machine"
        )
    if "LOCAL_RANK" not in variables:
        _refuse_a_pod_of_many(variables)
    return Membership(
        rank=_number(variables, "RANK"),
        world=_number(variables, "WORLD_SIZE"),
        local_rank=_number(variables, "LOCAL_RANK", 0),
        address=variables["MASTER_ADDR"],
        port=_number(variables, "MASTER_PORT"),
        restart=_number(variables, "TORCHELASTIC_RESTART_COUNT", 0),
        by="torchrun" if "LOCAL_RANK" in variables else "pod",
        hosted=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        one_machine=variables.get("LOCAL_WORLD_SIZE") == variables["WORLD_SIZE"],
        agent="TORCHELASTIC_RUN_ID" in variables,
    )


def _refuse_a_pod_of_many(variables: Variables) -> None:
    """A PyTorchJob numbers pods, not processes: with several processes in a pod, RANK is not a rank without torchrun."""
    each = variables.get("PET_NPROC_PER_NODE", "1")
    if each.isdecimal() and int(each) > 1:
        raise UserError(
            f"PET_NPROC_PER_NODE = {each} and LOCAL_RANK is not set: this is a pod for {each} ranks, not a rank. "
            "Let the container begin with `torchrun --no-python cubeloom train FILE`"
        )


def _refuse_half_a_job(variables: Variables) -> None:
    # MASTER_ADDR and MASTER_PORT alone name a rendezvous, not a job.
    half = [name for name in ("WORLD_SIZE", "LOCAL_RANK") if name in variables]
    if half:
        raise UserError(f"{' and '.join(half)} set, and RANK not: set all of a rank's variables, or none")
    nodes = variables.get("PET_NNODES", "1")
    if nodes not in ("1", "1:1"):
        raise UserError(
            f"PET_NNODES = {nodes}: this is one of the pods of a TrainJob, and torchrun did not start it. "
            "Let the container begin with `torchrun --no-python cubeloom train FILE`"
        )


def _by_mpirun(variables: Variables) -> Membership | None:
    """Open MPI's. It does not say where ranks can meet, unless all are on this machine."""
    prefix = "OMPI_COMM_WORLD_"
    if f"{prefix}RANK" not in variables:
        return None
    world = _number(variables, f"{prefix}SIZE")
    here = _number(variables, f"{prefix}LOCAL_SIZE", 0)
    if world != here and not variables.get("MASTER_ADDR"):
        raise UserError(
            "mpirun does not say where ranks of several machines meet: add `-x MASTER_ADDR=HOST`, the machine of rank 0"
        )
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid", "")
    return Membership(
        rank=_number(variables, f"{prefix}RANK"),
        world=world,
        local_rank=_number(variables, f"{prefix}LOCAL_RANK"),
        address=variables.get("MASTER_ADDR") or _LOCAL,
        port=_number(variables, "MASTER_PORT", _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS),
        by="mpirun",
        one_machine=world == here,
    )


def _by_srun(variables: Variables) -> Membership | None:
    """A task of a Slurm step.

    A batch script also has SLURM_PROCID = 0 and SLURM_NTASKS, although it is not a task: only a step has
    SLURM_STEP_NODELIST. A step of one task is a shell that srun or salloc opened, or a job of one rank, for which it
    does not matter who starts it.
    """
    if "SLURM_PROCID" not in variables or "SLURM_STEP_NODELIST" not in variables:
        return None
    world = _number(variables, "SLURM_STEP_NUM_TASKS", _number(variables, "SLURM_NTASKS", 1))
    if world == 1:
        return None
    job, step = _number(variables, "SLURM_JOB_ID"), _number(variables, "SLURM_STEP_ID")
    return Membership(
        rank=_number(variables, "SLURM_PROCID"),
        world=world,
        local_rank=_number(variables, "SLURM_LOCALID"),
        address=variables.get("MASTER_ADDR") or first_host(variables["SLURM_STEP_NODELIST"]),
        port=_number(variables, "MASTER_PORT", _FIRST_PORT + (job + _STEP * step) % _PORTS),
        restart=_number(variables, "SLURM_RESTART_COUNT", 0),
        by="srun",
        one_machine=variables.get("SLURM_STEP_NUM_NODES") == "1",
    )


def first_host(nodes: str) -> str:
    """The first host of a Slurm list: `node[03-05,7],other` begins with node03."""
    first = re.match(r"(?:[^,\[\]\s]|\[\d[\d,-]*\])+(?=,|$)", nodes)
    if first is None:
        raise UserError(f"SLURM_STEP_NODELIST = {nodes!r} is not a list of machines such as node[03-05,7]")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def _number(variables: Variables, name: str, default: int | None = None) -> int:
    text = variables.get(name)
    if text is None:
        if default is None:
            raise UserError(f"{name} is not set, though other variables of the same launcher are")
        return default
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise UserError(f"{name} = {text!r} should be a whole number from 0 up")
    return int(text)
