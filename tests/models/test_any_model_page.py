"""The programs of docs/any-model.md: what it prints is what the page shows, and each launcher trains the serial model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts import run_script

from .parallelized import untouched

PAGE = (Path(__file__).parents[2] / "docs" / "any-model.md").read_text()
PROGRAM, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
STEPS = 3


@pytest.mark.slow
def test_the_report_is_what_the_page_shows(tmp_path: Path) -> None:
    ((script, shown),) = re.findall(
        r"```python\n((?:(?!```).)*print\(report\).*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL
    )
    file = tmp_path / "report.py"
    file.write_text(script)
    done = run_script(file)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


def program(kind: str, launcher: str) -> str:
    """The page's, for another model, which writes what it has learned."""
    text = PROGRAM.split('if __name__ == "__main__":')[0]
    changes = {
        r'cl.save\(model, "out", optimizer=optimizer\)': 'cl.save_pretrained(model, "written")',
        r"\* 3 ": f"* {STEPS} ",
    }
    if kind == "bert":
        changes["AutoModelForCausalLM"] = "AutoModelForMaskedLM"
    if launcher == "alone":
        changes[r"cl.init\(data=2, z=2, y=2\)"] = "cl.init()"
    for old, new in changes.items():
        text, times = re.subn(old, new, text)
        assert times, old
    return text + 'if __name__ == "__main__":\n    ' + ("run(8, train)" if launcher == "run" else "train()") + "\n"


def trained(model: Any) -> dict[str, Tensor]:
    """As the page's loop does it."""
    tokens = torch.arange(8 * 16).view(8, 16) % 96
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(STEPS):
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    "kind, launcher",
    [
        pytest.param("gpt2", "alone", marks=pytest.mark.slow),
        *(
            pytest.param(kind, launcher, marks=pytest.mark.long)
            for kind, launcher in (("llama", "torchrun"), ("gpt2", "torchrun"), ("bert", "torchrun"))
        ),
        *(pytest.param(kind, "run", marks=pytest.mark.long) for kind in ("llama", "gpt2", "bert")),
    ],
)
def test_the_program_trains_the_serial_model(kind: str, launcher: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    serial = untouched(kind)
    serial.save_pretrained(tmp_path / "llama")
    file = tmp_path / "train.py"
    file.write_text(program(kind, launcher))
    if launcher == "torchrun":
        torchrun = str(Path(sys.executable).parent / "torchrun")
        command = [torchrun, "--standalone", "--nproc-per-node", "8", str(file)]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    else:
        done = run_script(file, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not done.stdout
    found = type(serial).from_pretrained(tmp_path / "written").state_dict()
    wanted = trained(type(serial).from_pretrained(tmp_path / "llama").train())
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-5)
