"""Where collectives run on a GPU: one step of a woven GPT under the profiler, on ranks that share this machine's GPUs.

    python bench/weave_trace.py [--ranks 2] [--ways 2] [-o trace.json]

With `-o` writes rank 0's trace (open it in Perfetto). Says for how much of the time in which a collective's kernel ran another
kernel of the same rank computed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from cubeloom import Grid
from cubeloom.comm import Network, devices
from cubeloom.cube import Batch, Rest, apply, initial_values
from cubeloom.launch import run
from cubeloom.models import GPTConfig, build, cut_of
from cubeloom.weave import Weave

SIZE = GPTConfig(vocab=4096, positions=512, hidden=2048, layers=4, heads=16)
BATCH = Batch(samples=8, sequence=512)
Spans = list[tuple[float, float]]


def trace(ranks: int, ways: int, activations: str, folder: str) -> None:
    """Profile the fourth step, and leave rank 0's trace in the folder."""
    device = devices.current("cuda")
    network = Network(Grid(y=ranks), device)
    with torch.device("meta"):
        model = build(SIZE)
    strand = Batch(BATCH.samples // ways, BATCH.sequence)
    fill = initial_values(model, 0, torch.bfloat16, device)
    state = apply(model, cut_of(model), network, strand, fill, Rest(activations=activations))  # type: ignore[arg-type]
    woven = Weave(model, ways, state.staggers)
    tokens = (torch.arange(BATCH.samples * BATCH.sequence, device=device) % SIZE.vocab).view(BATCH.samples, -1)
    for _ in range(3):
        woven(tokens=tokens, targets=tokens).backward()
    devices.settle(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        woven(tokens=tokens, targets=tokens).backward()
        devices.settle(device)
    if network.rank == 0:
        profiler.export_chrome_trace(str(Path(folder) / "trace.json"))


def overlap(events: list[dict[str, object]]) -> tuple[float, float, float]:
    """Milliseconds of collectives, of other kernels, and of both at once."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    collectives = _union([_span(event) for event in kernels if "nccl" in str(event["name"]).lower()])
    others = _union([_span(event) for event in kernels if "nccl" not in str(event["name"]).lower()])
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in collectives for b in others)
    return _length(collectives) / 1000, _length(others) / 1000, both / 1000


def _span(event: dict[str, object]) -> tuple[float, float]:
    start, duration = float(str(event["ts"])), float(str(event["dur"]))
    return start, start + duration


def _union(spans: Spans) -> Spans:
    joined: Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ways", type=int, default=2)
    parser.add_argument("--rest", choices=["replicated", "sharded"], default="replicated")
    parser.add_argument("-o", type=Path, help="where to keep the trace")
    options = parser.parse_args()
    if not devices.available("cuda"):
        print("torch sees no GPU here")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        run(options.ranks, trace, options.ranks, options.ways, options.rest, folder, device="cuda")
        text = (Path(folder) / "trace.json").read_text()
    if options.o:
        options.o.write_text(text)
    collectives, others, both = overlap(json.loads(text)["traceEvents"])
    print(
        f"{options.rest}, {options.ranks} ranks, ways = {options.ways}: collectives {collectives:.1f} ms, other kernels "
        f"{others:.1f} ms, both at once {both:.1f} ms: {both / collectives:.0%} of the collectives' time"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
