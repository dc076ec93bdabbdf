"""The position of an operation in a user's code: the module, and the file and line outside of torch and
`cubeloom.parallel`.
"""

from __future__ import annotations

import ast
import inspect
import re
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import FrameType

import torch
from torch import nn

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)
# Where an `assert` can begin.
_ASSERTS = re.compile(r"(^|[:;])\s*assert\b", re.MULTILINE)


def _is_theirs(file: str) -> bool:
    return not file.startswith((_TORCH, _OURS, "<frozen"))


def here(names: Mapping[int, str]) -> str:
    """`blocks.0.mlp, my_model.py:41`. `names` has the ids of the model's modules."""
    frame: FrameType | None = inspect.currentframe()
    module, line = "", ""
    while frame is not None and not (module and line):
        own = frame.f_locals.get("self")
        if not module and isinstance(own, nn.Module):
            module = names.get(id(own), "")
        if not line and _is_theirs(frame.f_code.co_filename):
            line = f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ", ".join(filter(None, (module, line)))


def module_here(names: Mapping[int, str]) -> str | None:
    """The innermost module whose code is running."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        own = frame.f_locals.get("self")
        if isinstance(own, nn.Module) and id(own) in names:
            return names[id(own)]
        frame = frame.f_back
    return None


def in_assertion() -> bool:
    """Whether an `assert` of the user's code is being evaluated."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and not _is_theirs(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and frame.f_lineno in _assertions(frame.f_code.co_filename)


@cache
def _assertions(file: str) -> frozenset[int]:
    """The lines of a file's assertions."""
    try:
        text = Path(file).read_text(encoding="utf-8")
        # A model of Hugging Face runs through files of thousands of lines, most of them without any.
        nodes = ast.walk(ast.parse(text)) if _ASSERTS.search(text) else ()
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    found = (range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in nodes if isinstance(node, ast.Assert))
    return frozenset(line for lines in found for line in lines)


def raised(error: BaseException) -> str:
    """The position where an error was raised: the innermost line of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame for frame in reversed(frames) if _is_theirs(frame.filename)), None)
    return "" if line is None else f"{_short(line.filename)}:{line.lineno}"


def _short(file: str) -> str:
    path = Path(file)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return path.name
