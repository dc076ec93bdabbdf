"""Runs a job on a Ray cluster that exists: a placement group with one bundle per node, and in each an actor that runs
the node's ranks.

This process drives them. It prints what ranks print, and if a rank fails or a node is lost, it ends all ranks and
restarts them in a new placement group, at a new rendezvous.
"""

from __future__ import annotations

import logging
import re
import socket
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cubeloom.base.errors import UserError, counted, first_line
from cubeloom.base.host import version
from cubeloom.comm.world import LOCAL
from cubeloom.launch.elastic import JobFailed
from cubeloom.launch.environment import current
from cubeloom.launch.ray_node import About, Attempt, News, Node
from cubeloom.launch.slurm import INTERRUPTED
from cubeloom.launch.stop import Stop

_HERE = "auto"  # Ray's word for the cluster of this machine, or of RAY_ADDRESS
_LOOK = 1.0
_CONNECTS = 10.0  # seconds
_REFUSED = 2
_WIDTH = 160  # Ray's reasons can be longer


@dataclass
class Ended:
    """How the ranks of an attempt ended."""

    codes: dict[int, int] = field(default_factory=dict)
    """By rank, those that ended first come first."""
    lost: dict[int, str] = field(default_factory=dict)
    """The nodes that were lost, and what Ray says of it."""

    @property
    def failed(self) -> bool:
        return bool(self.lost) or any(code not in (0, INTERRUPTED) for code in self.codes.values())

    def exit_code(self, asked: bool) -> int | None:
        """None if the job should be restarted."""
        if _REFUSED in self.codes.values():
            return _REFUSED
        if asked or (not self.failed and any(self.codes.values())):
            return INTERRUPTED
        return None if self.failed else 0

    def why(self) -> str:
        for node, reason in self.lost.items():
            return f"node {node} was lost: {reason}"
        rank, code = next((rank, code) for rank, code in self.codes.items() if code not in (0, INTERRUPTED))
        return f"rank {rank} failed with " + (f"exit code {code}" if code >= 0 else f"signal {-code}")


@dataclass(frozen=True, kw_only=True)
class RayJob:
    """A job on a Ray cluster: one actor per node, and a process per rank."""

    settings: str
    """All settings of the job, as TOML."""
    command: tuple[str, ...]
    """What Python runs in each rank; the path of the settings is appended."""
    nodes: int
    ranks_per_node: int
    gpus: bool
    """Whether each rank needs a GPU."""
    cpus_per_rank: int
    folder: Path
    """The ranks' working directory, so that relative paths mean the same as here."""
    restarts: int
    address: str | None = None
    """Of the cluster; by default RAY_ADDRESS, or the cluster that this machine belongs to."""
    wait: float = 60
    """Seconds that the cluster has to provide the nodes."""

    def run(self) -> int:
        """Train, and return the exit code of `cubeloom train`."""
        with _connected(self.address) as ray, Stop() as stop:
            for attempt in range(self.restarts + 1):
                ended = _Attempt(self, attempt, ray, stop).run()
                code = ended.exit_code(stop.asked)
                if code is not None:
                    return code
                _say(f"attempt {attempt} ended: {ended.why()}")
        raise JobFailed(f"{ended.why()}, after {counted(self.restarts, 'restart')}")

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray has to keep free on each node."""
        cpus = {"CPU": float(self.ranks_per_node * self.cpus_per_rank)}
        return {**cpus, "GPU": float(self.ranks_per_node)} if self.gpus else cpus


class _Attempt:
    """One start of all ranks."""

    def __init__(self, job: RayJob, number: int, ray: Any, stop: Stop) -> None:
        self._job = job
        self._number = number
        self._ray = ray
        self._stop = stop
        self._nodes: list[Any] = []
        self._ended = Ended()

    def run(self) -> Ended:
        from ray.util.placement_group import placement_group, remove_placement_group

        group = placement_group([self._job.bundle] * self._job.nodes, strategy="STRICT_SPREAD")
        try:
            self._await(group)
            if not self._stop.asked:
                self._start(group)
                self._follow()
        finally:
            for node in self._nodes:
                self._ray.kill(node)
            remove_placement_group(group)
        return self._ended

    def _await(self, group: Any) -> None:
        """Ray may have to start nodes first, or to find out that one is gone."""
        began, said = time.monotonic(), False
        while not group.wait(_LOOK) and not self._stop.asked:
            waited = time.monotonic() - began
            if waited > self._job.wait:
                self._give_up()
            if waited > 2 * _LOOK and not said:
                said = True
                _say(f"waiting for {self._wanted()}; {_offered(self._ray)}")

    def _wanted(self) -> str:
        return f"{counted(self._job.nodes, 'node')} with {_sizes(self._job.bundle)} free"

    def _give_up(self) -> None:
        words = f"the Ray cluster did not provide {self._wanted()} within {self._job.wait:g} s; {_offered(self._ray)}"
        if self._number:
            raise JobFailed(words)
        raise UserError(f"{words}. Change --nodes, --gpus-per-node or --cpus-per-rank, or --wait longer")

    def _start(self, group: Any) -> None:
        """Create the actors, and start the ranks. A node that is lost meanwhile ends the attempt."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        job, bundle = self._job, self._job.bundle
        actor = self._ray.remote(Node)
        for place in range(job.nodes):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
            options = actor.options(num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=where)
            self._nodes.append(options.remote())
        about = [self._get(place, node.about.remote(str(job.folder))) for place, node in enumerate(self._nodes)]
        if self._ended.lost:
            return
        _check(about, job.folder)
        address = about[0].address if job.nodes > 1 else LOCAL
        port = self._get(0, self._nodes[0].host.remote(address))
        if port is None:
            return
        attempt = Attempt(
            settings=job.settings,
            command=job.command,
            folder=str(job.folder),
            world=job.nodes * job.ranks_per_node,
            ranks_per_node=job.ranks_per_node,
            address=address,
            port=port,
            number=self._number,
        )
        for place, node in enumerate(self._nodes):
            ranks = range(place * job.ranks_per_node, (place + 1) * job.ranks_per_node)
            self._get(place, node.start.remote(attempt, ranks, about[place].address))

    def _get(self, place: int, reply: Any) -> Any:
        """The reply of a node; None if it was lost."""
        try:
            return self._ray.get(reply)
        except self._ray.exceptions.RayActorError as error:
            if "No module named 'cubeloom'" in str(error):
                raise UserError(
                    "cubeloom is not installed on every node of the Ray cluster, or not for its Python"
                ) from None
            self._ended.lost[place] = textwrap.shorten(first_line(error), _WIDTH, placeholder=" …")
        return None

    def _follow(self) -> None:
        """Print what ranks say until all have ended. If one fails, or this process is asked to stop, stop the others."""
        stopping = False
        waiting = {node.news.remote(): place for place, node in enumerate(self._nodes) if place not in self._ended.lost}
        while waiting:
            if (self._ended.failed or self._stop.asked) and not stopping:
                stopping = True
                for place in waiting.values():
                    self._nodes[place].stop.remote()
            ready, _ = self._ray.wait(list(waiting), timeout=_LOOK)
            for reply in ready:
                place = waiting.pop(reply)
                news: News | None = self._get(place, reply)
                if news is None:
                    continue
                for line in news.lines:
                    _say(line)
                self._ended.codes.update(news.codes)
                if news.running:
                    waiting[self._nodes[place].news.remote()] = place


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    try:
        import ray
    except ImportError:
        raise UserError("`cubeloom launch ray` needs the package ray: pip install 'cubeloom[ray]'") from None
    address = address or current().get("RAY_ADDRESS")
    if address is not None:
        _check_reachable(address)
    try:
        ray.init(address or _HERE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = "on this machine" if address is None else f"at {address}"
        raise UserError(
            f"there is no Ray cluster {where}: {first_line(error)}; start one with `ray start --head`, or give --address"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch(r"\d+", port, re.ASCII) or "/" in host:
        raise UserError(f"the Ray cluster {address!r} should be given as HOST:PORT, such as node1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECTS).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"there is no Ray cluster at {address}: {error}") from None


def _check(about: list[About], folder: Path) -> None:
    """Raises UserError if a node cannot run the job as this machine understands it."""
    for node in about:
        if not node.has_folder:
            raise UserError(f"there is no folder {folder} on {node.address}: ranks work in this folder on every node")
        for package, theirs in node.versions.items():
            ours = version(package)
            if theirs != ours:
                raise UserError(f"{package} is {ours} here and {theirs} on {node.address}: all nodes need the same")


def _offered(ray: Any) -> str:
    """The nodes of the cluster, and their sizes."""
    nodes = sorted((each["NodeManagerAddress"], each["Resources"]) for each in ray.nodes() if each["Alive"])
    return "it has " + "; ".join(f"{address} with {_sizes(resources)}" for address, resources in nodes)


def _sizes(resources: Mapping[str, float]) -> str:
    return (
        " and ".join(counted(int(resources.get(name, 0)), name) for name in ("CPU", "GPU") if resources.get(name))
        or "nothing"
    )


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
