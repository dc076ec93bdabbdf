"""`cubeloom launch`: trains a job on a cluster, or writes the script or manifest that does."""

from __future__ import annotations

import math
import re
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from cubeloom.base.divisors import divisors
from cubeloom.base.errors import UserError
from cubeloom.base.files import write_asked
from cubeloom.base.limits import within
from cubeloom.base.settings import load, write
from cubeloom.comm.kinds import CPU
from cubeloom.launch.kubernetes import TrainJob
from cubeloom.launch.slurm import SlurmScript
from cubeloom.train.job.job import Job

_TRAIN = ("cubeloom", "train")
_GPUS = 8  # per machine, by default


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Write the sbatch script that trains a job on a Slurm cluster, one task per rank.

    The job is checked first. The script is queued again if its time limit was too short, and restarts failed steps.
    """

    file: tyro.conf.Positional[Path]
    """The job's settings, TOML or a Python recipe (.py), which is executed; `--a.b=c` sets one of them."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o", "--out"])] = None
    """Where to write the script; printed by default."""
    nodes: int | None = None
    """By default as many as the grid needs."""
    gpus_per_node: int | None = None
    """Ranks per node, each with a GPU: 8 by default; a job on the CPU has by default all its ranks on one node."""
    time: str = "24:00:00"
    """The time limit, in Slurm's format; the job is queued again if it was too short."""
    notice: int = 180
    """Seconds before the limit at which ranks are told to write a checkpoint and stop."""
    cpus_per_rank: int | None = None
    """Cores per rank: by default 8 with a GPU, otherwise 2."""
    partition: str | None = None
    account: str | None = None
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def __call__(self) -> int:
        job = load(Job, self.file, self.overrides)
        from cubeloom.train.job import check

        # The machine that writes the script need not have the devices that will run it.
        check(job, device_here=False)
        give(self.script(job).text(), self.output)
        return 0

    def script(self, job: Job) -> SlurmScript:
        nodes, each = spread(job, self.nodes, self.gpus_per_node)
        return SlurmScript(
            name=name_of(self.file),
            command=(*_TRAIN, str(self.file.resolve()), *(f"--{text.removeprefix('--')}" for text in self.overrides)),
            nodes=nodes,
            ranks_per_node=each,
            gpus=job.device != CPU,
            folder=Path.cwd(),
            programs=Path(sys.executable).parent,
            cpus_per_rank=self.cpus_per_rank or (2 if job.device == CPU else 8),
            time=self.time,
            notice=self.notice,
            partition=self.partition,
            account=self.account,
            restarts=job.restarts,
        )


@dataclass(frozen=True, kw_only=True)
class Kubernetes:
    """Write the manifest that trains a job on a Kubernetes cluster with Kubeflow Trainer v2: a TrainJob and its settings.

    The job is checked first, except for its folder and data, which are paths in a pod.
    """

    file: tyro.conf.Positional[Path]
    """The job's settings, TOML or a Python recipe (.py), which is executed; `--a.b=c` sets one of them."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o", "--out"])] = None
    """Where to write the manifest; printed by default."""
    image: str = "cubeloom:latest"
    """A container image in which cubeloom is installed."""
    name: str | None = None
    """The name of the TrainJob; by default the file's."""
    namespace: str | None = None
    """By default kubectl's namespace."""
    runtime: str = "torch-distributed"
    """The ClusterTrainingRuntime."""
    claim: str | None = None
    """A PersistentVolumeClaim that all pods write to; without one the run is lost with its pods."""
    mount: str = "/work"
    """The mount path of the claim; relative paths in the settings are inside it."""
    nodes: int | None = None
    """By default as many as the grid needs."""
    gpus_per_node: int | None = None
    """Ranks per pod, each with a GPU: 8 by default; a job on the CPU has by default all its ranks in one pod."""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def __call__(self) -> int:
        job = load(Job, self.file, self.overrides)
        from cubeloom.train.job import check

        here = replace(job, folder=Path(tempfile.gettempdir()), data=replace(job.data, sources=()))
        check(here, device_here=False)
        give(self.manifest(job).text(), self.output)
        return 0

    def manifest(self, job: Job) -> TrainJob:
        nodes, each = spread(job, self.nodes, self.gpus_per_node)
        return TrainJob(
            name=name_of(self.file) if self.name is None else self.name,
            settings=write(job),
            command=_TRAIN,
            nodes=nodes,
            ranks_per_node=each,
            gpus=job.device != CPU,
            image=self.image,
            namespace=self.namespace,
            runtime=self.runtime,
            claim=self.claim,
            mount=self.mount,
            restarts=job.restarts,
        )


@dataclass(frozen=True, kw_only=True)
class Ray:
    """Train a job on a Ray cluster that is running. Nothing is written: the ranks start at once.

    The job is checked first. Ray reserves the nodes; one actor per node starts its ranks, and this command prints what
    they print. If a rank fails or a node is lost, the job is restarted from its last checkpoint, as often as the setting
    `restarts` allows. Exits as `cubeloom train` does.
    """

    file: tyro.conf.Positional[Path]
    """The job's settings, TOML or a Python recipe (.py), which is executed; `--a.b=c` sets one of them."""
    address: str | None = None
    """The cluster, as HOST:PORT; by default RAY_ADDRESS, or the cluster that this machine belongs to."""
    nodes: int | None = None
    """By default as many as the grid needs."""
    gpus_per_node: int | None = None
    """Ranks per node, each with a GPU: 8 by default; a job on the CPU has by default all its ranks on one node."""
    cpus_per_rank: int | None = None
    """CPUs that Ray reserves for each rank: by default 8 with a GPU, otherwise 1."""
    wait: float = 60
    """Seconds that the cluster has to provide the nodes, at the start and after a failure."""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def __call__(self) -> int:
        job = load(Job, self.file, self.overrides)
        nodes, each = spread(job, self.nodes, self.gpus_per_node)
        if self.cpus_per_rank is not None:
            within("--cpus-per-rank", self.cpus_per_rank)
        if not 0 < self.wait < math.inf:
            raise UserError(f"--wait must be a number of seconds above 0, got {self.wait}")
        from cubeloom.launch.elastic import JobFailed
        from cubeloom.launch.ray import RayJob
        from cubeloom.train.job import check

        check(job, device_here=False)
        launched = RayJob(
            settings=write(job),
            command=("-m", *_TRAIN),
            nodes=nodes,
            ranks_per_node=each,
            gpus=job.device != CPU,
            cpus_per_rank=self.cpus_per_rank or (1 if job.device == CPU else 8),
            folder=Path.cwd(),
            restarts=job.restarts,
            address=self.address,
            wait=self.wait,
        )
        try:
            return launched.run()
        except JobFailed as error:
            raise SystemExit(f"cubeloom: {error}") from None


Launch = (
    Annotated[Slurm, tyro.conf.subcommand("slurm")]
    | Annotated[Kubernetes, tyro.conf.subcommand("kubernetes")]
    | Annotated[Ray, tyro.conf.subcommand("ray")]
)


def spread(job: Job, nodes: int | None, each: int | None) -> tuple[int, int]:
    """Divide the ranks of the job evenly over nodes: (nodes, ranks per node)."""
    world = job.grid.world
    for option, value in (("--nodes", nodes), ("--gpus-per-node", each)):
        if value is not None and value < 1:
            raise UserError(f"{option} must be at least 1, got {value}")
    if each is None:
        each = _GPUS if job.device != CPU and nodes is None else world
    most = min(each, world)
    found = -(-world // most) if nodes is None else nodes
    if world % found or world // found > each:
        fitting = [str(size) for size in divisors(world) if size <= most]
        raise UserError(
            f"the {world} ranks of grid {job.grid} cannot lie evenly on {found} nodes with at most {each} on each; "
            f"{world} ranks go by {', '.join(fitting)} on a node"
        )
    return found, world // found


def name_of(file: Path) -> str:
    """A name that is valid in Slurm and Kubernetes."""
    plain = re.sub(r"[^a-z0-9]+", "-", file.stem.lower()).strip("-")[:40].strip("-")
    return plain if plain[:1].isalpha() else f"job-{plain}".strip("-")


def give(text: str, out: Path | None) -> None:
    """Print, or write to a file atomically."""
    if out is None:
        print(text, end="")
        return
    write_asked(out, text)
    print(out)
