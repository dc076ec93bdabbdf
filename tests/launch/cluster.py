"""A Slurm cluster for as long as a test needs it: of this machine alone, in a folder and at ports of its own; or of the hosts
of a cluster in a box, with the controller on the first.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from cluster_in_a_box import Host

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue", "sinfo")
_PATIENCE = 30.0  # seconds for the cluster to come up

_CONF = """
ClusterName=cubeloom
SlurmctldHost={controller}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# Nothing of the kernel's: this may itself be a container.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=5
# More cores than there may be: ranks of a test share them.
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


_NODE = "NodeName={name} NodeAddr={address} CPUs=16 SocketsPerBoard=16 CoresPerSocket=1 ThreadsPerCore=1"


def missing() -> list[str]:
    """Programs of Slurm that are not here."""
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class LocalSlurm:
    def __init__(self, hosts: Sequence[Host] = ()) -> None:
        self._hosts = hosts

    def __enter__(self) -> LocalSlurm:
        # Not pytest's folder, which nobody else may enter: munge's socket must be open to all.
        self.folder = Path(tempfile.mkdtemp(prefix="cubeloom-slurm-"))
        self.folder.chmod(0o755)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "PATH": _path(),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        try:
            self._begin()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            error.add_note(self.logs())
        self._end()

    def _begin(self) -> None:
        nodes = {host.name: host.address for host in self._hosts} or {"localhost": "localhost"}
        first = next(iter(nodes))
        (self.folder / "state").mkdir()
        for name in nodes:
            (self.folder / f"spool-{name}").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        controller_port, node_port = _free_ports(2)
        (self.folder / "slurm.conf").write_text(
            _CONF.format(
                folder=self.folder,
                user=getpass.getuser(),
                controller=f"{first}({nodes[first]})" if self._hosts else first,
                controller_port=controller_port,
                node_port=node_port,
                nodes="\n".join(_NODE.format(name=name, address=address) for name, address in nodes.items()),
            )
        )
        names = self.folder / "hosts"
        names.write_text(
            "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **nodes}.items())
        )
        for host in self._hosts:
            host.knows(names)
        files = [f"--{name}-file={self.folder / f'munge.{name}'}" for name in ("key", "pid", "log", "seed")]
        self._start(first, "munged", "--foreground", f"--socket={self.folder / 'munge.socket'}", *files)
        self.until((self.folder / "munge.socket").exists, "munge began")
        self._start(first, "slurmctld", "-D", "-c")
        for name in nodes:
            self._start(name, "slurmd", "-D", "-N", name)
        self.until(self._idle, "all nodes are idle")

    def _idle(self) -> bool:
        return set(self.call("sinfo", "--noheader", "--Node", "--format=%T", check=False).split()) == {"idle"}

    def _start(self, where: str, *command: str) -> None:
        log = self.folder / f"{command[0]}-{where}.out"
        for host in self._hosts:
            if host.name == where:
                host.start(command, log, self.environment)
                self._processes.append(host.started[-1])
                return
        with log.open("wb") as out:
            self._processes.append(
                subprocess.Popen(command, env=self.environment, stdout=out, stderr=subprocess.STDOUT)
            )

    def until(self, ready: Callable[[], bool], what: str, timeout: float = _PATIENCE) -> None:
        deadline = time.monotonic() + timeout
        while not ready():
            dead = [str(process.args) for process in self._processes if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise TimeoutError(f"waited {timeout:g} s until {what}; ended: {dead}\n{self.logs()}")
            time.sleep(0.2)

    def _end(self) -> None:
        if len(self._processes) > 2:
            self.call("scancel", "--full", f"--user={getpass.getuser()}", check=False)
            with suppress(TimeoutError):
                self.until(lambda: not self.call("squeue", "--noheader", check=False), "no job is left")
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(self, *command: str, check: bool = True, cwd: Path | None = None) -> str:
        """What a command of Slurm's says."""
        words = self._hosts[0].within(command) if self._hosts else command
        done = subprocess.run(words, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=60)
        if check and done.returncode:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def submit(self, script: Path) -> str:
        """The job's number. Its output lies beside the script."""
        return self.call("sbatch", "--parsable", str(script), cwd=script.parent)

    def show(self, job: str) -> dict[str, str]:
        fields = self.call("scontrol", "show", "job", "--oneliner", job).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait(self, job: str, *states: str, timeout: float = 120) -> dict[str, str]:
        """All of the job, once it is in one of these states."""
        self.until(lambda: self.show(job)["JobState"] in states, f"job {job} is {' or '.join(states)}", timeout)
        return self.show(job)

    def logs(self) -> str:
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
