"""Lets the server that ranks fork from find the files of tests: Python 3.11 does not give it the paths of its parent.

They are in its PYTHONPATH while it starts. It imports this file first, which takes them out again: ranks would pass them on.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_HERE = Path(__file__).parent
_NAME = "PYTHONPATH"


def with_tests() -> str:
    """PYTHONPATH, and those of this process's paths that have tests."""
    return os.pathsep.join((*_others(), *filter(_of_tests, sys.path)))


def _of_tests(path: str) -> bool:
    return Path(path).is_relative_to(_HERE)


def _others() -> list[str]:
    return [path for path in os.environ.get(_NAME, "").split(os.pathsep) if path and not _of_tests(path)]


if _NAME in os.environ:
    os.environ[_NAME] = os.pathsep.join(_others())
