"""Measures this machine. The checks interpret the measurements."""

from __future__ import annotations

import platform
import re
import resource
import shutil
import socket
import time
from pathlib import Path

import torch

from cubeloom.base import host
from cubeloom.comm import devices
from cubeloom.launch import environment
from cubeloom.tools.doctor.facts import Accelerator, Clocks, Devices, Facts, Machine, Room
from cubeloom.tools.doctor.links import measure_links

PACKAGES = ("cubeloom", "torch", "numpy", "einops", "greenlet", "safetensors", "tyro", "rich", "tokenizers", "pyarrow")
_SHARED = Path("/dev/shm")
_DRIVER = Path("/proc/driver/nvidia/version")


def gather(ranks: int, folder: Path) -> Facts:
    """All facts. Starts ranks for a few seconds to measure their communication."""
    kinds = [kind for kind in devices.BACKENDS if devices.available(kind)]
    return Facts(
        ranks=ranks,
        machine=machine(folder),
        devices=Devices(driver=driver(), runtime=torch.version.cuda, accelerators=accelerators()),
        versions={"python": platform.python_version(), **{name: host.version(name) for name in PACKAGES}},
        clocks=Clocks(resolution=time.get_clock_info("monotonic").resolution, now=time.time()),
        links=tuple(measure_links(kind, ranks) for kind in kinds),
        variables=dict(environment.current()),
    )


def machine(folder: Path) -> Machine:
    total, free = host.memory()
    return Machine(
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        cores=host.cores(),
        memory=total,
        memory_free=free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        disk=room(folder),
        shared_memory=room(_SHARED) if _SHARED.is_dir() else None,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
    )


def driver() -> str | None:
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", host.text_of(_DRIVER))
    return found[1] if found else None


def accelerators() -> tuple[Accelerator, ...]:
    kinds = [kind for kind in devices.BACKENDS if kind != devices.CPU and devices.available(kind)]
    found = []
    for kind in kinds:
        module = torch.get_device_module(kind)
        for index in range(devices.count(kind)):
            free, total = module.mem_get_info(index)
            name = module.get_device_name(index)
            found.append(Accelerator(kind=kind, name=name, memory=total, memory_free=free))
    return tuple(found)


def room(path: Path) -> Room:
    usage = shutil.disk_usage(path)
    return Room(path=str(path), total=usage.total, free=usage.free)
