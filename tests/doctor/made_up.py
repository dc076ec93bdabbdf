"""A machine with which nothing is wrong, to be changed for the worse."""

from __future__ import annotations

from cubeloom.tools.doctor.facts import Accelerator, Clocks, Devices, Facts, Links, Machine, Room

GIB = 1 << 30

MACHINE = Machine(
    system="Linux",
    cores=16,
    memory=64 * GIB,
    memory_free=48 * GIB,
    open_files=65_536,
    disk=Room(path="/work", total=1000 * GIB, free=500 * GIB),
    shared_memory=Room(path="/dev/shm", total=32 * GIB, free=32 * GIB),
    interfaces=("lo", "eth0", "ib0"),
)
GPU = Accelerator(kind="cuda", name="H200", memory=139 * GIB, memory_free=138 * GIB)
DEVICES = Devices(driver="570.1", runtime="12.8", accelerators=(GPU, GPU, GPU, GPU))
LINKS = Links(
    kind="cpu",
    backend="gloo",
    version=None,
    ranks=4,
    latency=2e-5,
    bandwidth=3e9,
    all_reduce=2e9,
    skew=1e-5,
    skew_error=2e-5,
)
FACTS = Facts(
    ranks=4,
    machine=MACHINE,
    devices=DEVICES,
    versions={
        "python": "3.11.7",
        "torch": "2.13.0+cpu",
        "numpy": "2.4",
        "einops": "1",
        "greenlet": "3",
        "safetensors": "1",
        "tyro": "1",
        "rich": "15",
        "pyarrow": None,
    },
    clocks=Clocks(resolution=1e-9, now=1_800_000_000.0),
    links=(LINKS,),
    variables={"HOME": "/root", "OMP_NUM_THREADS": "1", "SECRET_TOKEN": "hidden"},
)
