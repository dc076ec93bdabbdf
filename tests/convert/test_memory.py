"""A conversion never holds the model: its peak of memory is that of a few tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cubeloom.models import GPTConfig, LanguageConfig, LlamaConfig, build, to_hugging_face
from cubeloom.models.hugging_face import rules_to_write
from cubeloom.tools.convert.hugging_face_config import write_config
from cubeloom.tools.convert.safetensors_files import SafetensorsFiles

from . import folders

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the peak")

# Some 65 MB in many layers, of which no tensor is larger than 3 MB.
GPT = GPTConfig(vocab=1000, positions=64, hidden=320, layers=13, heads=8)
LLAMA = LlamaConfig(vocab=1000, positions=64, hidden=320, layers=15, heads=8, kv_heads=4, mlp_hidden=800)
# 4.4 GB, of which the largest tensor has 262 MB.
BILLION = LlamaConfig(vocab=32000, positions=2048, hidden=2048, layers=22, heads=32, kv_heads=4, mlp_hidden=5632)
# In a process of its own; the first conversion, of a small model, loads what is loaded once.
PROGRAM = """
import json, sys
from pathlib import Path
from cubeloom.tools.convert import convert

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

small, large = map(Path, sys.argv[1:])
peaks = []
for folder in (small, large):
    convert(folder / "theirs", folder / "ours")
    peaks.append(peak())
    done = convert(folder / "ours", folder / "back")
    peaks.append(peak())
print(json.dumps({"peaks": peaks, "bytes": done.bytes, "transformers": "transformers" in sys.modules}))
"""


def make(folder: Path, config: LanguageConfig) -> None:
    """As transformers would save it; a tensor at a time too, so that these tests need not hold it either."""
    folder.mkdir(parents=True)
    with torch.device("meta"):
        shapes = to_hugging_face(config, build(config).state_dict())
    tensors = {name: shapes[name] for rule in rules_to_write(config) for name in rule.theirs}
    files = SafetensorsFiles(folder, tensors, shard_size=40_000_000)
    for name, shape in tensors.items():
        files.write(name, torch.randn(shape.shape))
    (folder / "config.json").write_text(json.dumps(write_config(config, "float32", {})))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "config",
    [GPT, pytest.param(LLAMA, marks=pytest.mark.long), pytest.param(BILLION, marks=pytest.mark.long)],
    ids=["GPT", "Llama", "Llama of a billion"],
)
def test_the_peak_is_that_of_a_few_tensors(tmp_path: Path, config: LanguageConfig) -> None:
    folders.saved(tmp_path / "small" / "theirs", folders.prepare(folders.gpt2()))
    make(tmp_path / "large" / "theirs", config)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "small"), str(tmp_path / "large")]
    # By default glibc takes ever larger tensors from its heap, whose gaps then count: 6 to 17 MB, by chance. With a fixed
    # threshold each tensor has pages of its own, and the peak is what the program holds.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "262144"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800, env=environment)
    found = json.loads(done.stdout)
    with torch.device("meta"):
        largest = max(parameter.nbytes for parameter in build(config).parameters())
    _, before, imported, exported = found["peaks"]
    sys.stdout.write(
        f"{found['bytes']:,} bytes, {largest:,} the largest tensor: the peak grew by {imported - before:,} bytes when they "
        f"were imported, and by {exported - before:,} in all\n"
    )
    assert imported <= exported < before + 4 * largest + 2_000_000 < before + 0.35 * found["bytes"]
    assert not found["transformers"]  # which users need not have
