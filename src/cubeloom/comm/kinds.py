"""The kinds of device that a rank can compute on, and the backend of each. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Kind = Literal["cpu", "cuda"]
BACKENDS: dict[Kind, str] = {"cpu": "gloo", "cuda": "nccl"}
CPU: Kind = "cpu"


def gpus_seen() -> tuple[Kind, int]:
    """The kind of device that this machine seems to have, and the number of GPUs, without calling CUDA."""
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return ("cuda", found) if found else (CPU, 0)
