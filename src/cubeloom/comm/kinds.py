"""The kinds of device that a rank can compute on, and the backend that joins such devices. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Kind = Literal["cpu", "cuda"]
BACKENDS: dict[Kind, str] = {"cpu": "gloo", "cuda": "nccl"}
CPU: Kind = "cpu"


def gpus_seen() -> tuple[Kind, int]:
    """What this machine seems to compute on, and how many GPUs it has, without asking CUDA."""
    found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return ("cuda", found) if found else (CPU, 0)
