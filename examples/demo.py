"""Text to tokens, a plan, a model on eight processes, a check, and text by the model; each step is a command to use yourself.

    make demo                                  # or: python examples/demo.py
    python examples/demo.py --steps 20         # any setting of examples/demo.toml

The text is the Python language reference, which every Python has for `help("if")`, so nothing is downloaded. Everything is
written under runs/.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "cubeloom"]
TEXT = Path("runs", "demo.txt")


def cubeloom(*arguments: str) -> None:
    print(f"\n$ cubeloom {' '.join(arguments)}", flush=True)
    done = subprocess.run([*COMMAND, *arguments])
    if done.returncode:
        sys.exit(done.returncode)


def write_text() -> None:
    """All topics of the language reference, one behind the other."""
    TEXT.parent.mkdir(exist_ok=True)
    TEXT.write_text("\n\n".join(topics.values()), encoding="utf-8")


def main() -> None:
    settings = sys.argv[1:]
    job = str(HERE / "demo.toml")
    tokens = ["--tokenizer", "bpe", "--vocab", "2048", "--validation", "0.05", "-o", "runs/demo-tokens"]
    write_text()
    cubeloom("data", "prepare", str(TEXT), *tokens)
    cubeloom("plan", job, "--cluster", "dgx-h100", "--devices", "8", "--top", "1")
    cubeloom("verify", job, "--steps", "1", "--batch.sequence", "32")
    cubeloom("train", job, *settings)
    cubeloom("sample", "runs/demo", "--prompt", "The", "--tokens", "120", "--temperature", "0.6")
    print("\nruns/demo/report.html shows the run: its curves, and the measured timeline of a step.")
    print("`cubeloom train examples/demo.toml --grid z=2 --steps 500` continues the same run on two processes.")


if __name__ == "__main__":
    main()
