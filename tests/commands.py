"""Commands in this process, which has imported torch already."""

from __future__ import annotations

import sys

import pytest

from cubeloom.cli import main


def exit_code(*arguments: object) -> int:
    """Of `cubeloom arguments`; what it prints is pytest's to capture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["cubeloom", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
    return int(left.value.code or 0)
