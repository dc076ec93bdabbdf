"""Text to tokens, tokens to a model on eight processes, and the model to text; each step a command that you can give yourself.

    make demo                                  # or: python examples/demo.py
    python examples/demo.py --steps=20         # any setting of examples/demo.toml

The text is the source of Python's own standard library, so nothing is downloaded. What is written lies under runs/.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
COMMAND = [sys.executable, "-m", "cubeloom"]


def cubeloom(*arguments: str, shown: str | None = None) -> None:
    print(f"\n$ cubeloom {shown or ' '.join(arguments)}", flush=True)
    done = subprocess.run([*COMMAND, *arguments])
    if done.returncode:
        sys.exit(done.returncode)


def main() -> None:
    settings = sys.argv[1:]
    texts = sorted(map(str, Path(sysconfig.get_path("stdlib")).glob("*.py")))
    Path("runs").mkdir(exist_ok=True)
    tokens = ["-o", "runs/demo-tokens", "--validation", "0.05"]
    cubeloom("data", "prepare", *texts, *tokens, shown=f"data prepare {Path(texts[0]).parent}/*.py {' '.join(tokens)}")
    cubeloom("train", str(HERE / "demo.toml"), *settings)
    cubeloom("sample", "runs/demo", "--prompt", "def ", "--tokens", "300")
    print(
        "\nruns/demo/report.html shows the run: its curves, and the measured timeline of a step beside the simulated one."
    )
    print(
        "Next: `cubeloom train examples/demo.toml --grid.pipe=1 --steps=400` goes on with the same run on four processes."
    )


if __name__ == "__main__":
    main()
