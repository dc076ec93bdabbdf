"""The example of diffusion trains, samples and writes its picture."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from scripts import run_script

EXAMPLE = Path(__file__).parent.parent / "examples" / "diffusion.py"


@pytest.mark.slow
def test_the_example_of_diffusion_writes_a_picture(tmp_path: Path) -> None:
    done = run_script(EXAMPLE, "--steps", "20", "-o", str(tmp_path / "digits.png"), "--seed", "3")
    assert done.returncode == 0, done.stderr
    said = next(line for line in done.stdout.splitlines() if line.startswith("loss")).split()
    assert float(said[4]) < float(said[1])  # loss 1.234 at first, 0.567 in the last steps
    picture = (tmp_path / "digits.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", picture[16:24]) == ((2 * 8 * 12 + 2) * 6, 6 * 12 * 6)
