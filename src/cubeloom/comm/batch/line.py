"""Where in a user's program a tensor of a batch is used."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[2])


def line() -> str:
    """The innermost `file:line` outside of torch and of this package."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS, "<")):
        frame = frame.f_back
    if frame is None:
        return ""
    path = Path(frame.f_code.co_filename)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path.name}:{frame.f_lineno}"
