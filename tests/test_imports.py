"""Each module can be imported first: none needs another to have been imported before it."""

from __future__ import annotations

import os
import pkgutil
import sys
from importlib import import_module
from pathlib import Path

import pytest

import cubeloom
from scripts import run_script


@pytest.mark.long
def test_every_module_can_be_the_first() -> None:
    done = run_script(Path(__file__))
    assert done.returncode == 0, done.stdout + done.stderr


def main() -> int:
    """Each in a process of its own, forked from one that has torch and nothing of ours."""
    import torch
    import torch.distributed.tensor  # noqa: F401

    names = [each.name for each in pkgutil.walk_packages(cubeloom.__path__, "cubeloom.")]
    ours = [name for name in sys.modules if name.partition(".")[0] == "cubeloom"]
    failed = []
    for name in names:
        if name.endswith("__main__"):
            continue
        child = os.fork()
        if not child:
            for each in ours:
                del sys.modules[each]
            try:
                import_module(name)
            except BaseException as error:
                print(f"{name}: {error}")  # noqa: T201
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            failed.append(name)
    print(failed)  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
