"""Chimera (Li and Hoefler 2021) on Piz Daint: GPT-2 of 64 layers on up to 2,048 nodes, Bert-48 on up to 64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from cubeloom.pipeline import Costs, Sync, generate, simulate
from cubeloom.plan.hardware import Cluster
from cubeloom.plan.hardware import cluster as known
from cubeloom.plan.model import load
from cubeloom.plan.reproduce import published as paper
from cubeloom.plan.reproduce.calibration import GIB, Calibrated, calibrate
from cubeloom.plan.reproduce.eager import ITEM, part
from cubeloom.plan.reproduce.equation import Estimate, choices
from cubeloom.plan.reproduce.pipelines import Run, Setup, run, stages
from cubeloom.plan.reproduce.report import Point, Report, Row, Share

_SCHEDULES = {
    "Chimera": "chimera",
    "PipeDream": "pipedream",
    "PipeDream-2BW": "pipedream-2bw",
    "GPipe": "gpipe",
    "GEMS": "gems",
    "DAPPLE": "1f1b",
}


def _setup(scheme: str, model: str, nodes: int, depth: int, size: int, batch: int | None) -> Setup:
    """Without a batch, each micro-batch is its own step."""
    width = nodes // depth
    return Setup(
        scheme=scheme, schedule=_SCHEDULES[scheme], model=model, sequence=_SEQUENCE[model], width=width, depth=depth,
        size=size, batch=width * size if batch is None else batch,
    )  # fmt: skip


_SEQUENCE = {
    "gpt2-64": 632,
    "bert-48": 128,
}  # from the sizes of messages and the job scripts in the authors' repository


def gpt2(nodes: int) -> dict[str, Setup]:
    """Figure 1 and 15: D as printed, B = 1, one sequence per node. GEMS, which holds one micro-batch, has the largest
    that fits; PipeDream's is from the authors' job script.
    """
    return {
        "Chimera": _setup("Chimera", "gpt2-64", nodes, 32, 1, nodes),
        "PipeDream": _setup("PipeDream", "gpt2-64", nodes, 8, 2, None),
        "PipeDream-2BW": _setup("PipeDream-2BW", "gpt2-64", nodes, 16, 1, nodes),
        "GPipe": _setup("GPipe", "gpt2-64", nodes, 8, 1, nodes),
        "GEMS": _setup("GEMS", "gpt2-64", nodes, 8, 4, nodes),
        "DAPPLE": _setup("DAPPLE", "gpt2-64", nodes, 16, 1, nodes),
    }


def bert(nodes: int) -> dict[str, Setup]:
    """Figure 14: D and B as printed, 16 sequences per node. PipeDream's B is that of figure 17: a batch of 48 on 32
    nodes.
    """
    batch = 16 * nodes
    return {
        "Chimera": _setup("Chimera", "bert-48", nodes, 4, 8, batch),
        "PipeDream": _setup("PipeDream", "bert-48", nodes, 8, 12, None),
        "PipeDream-2BW": _setup("PipeDream-2BW", "bert-48", nodes, 4, 16, batch),
        "GPipe": _setup("GPipe", "bert-48", nodes, 4, 4, batch),
        "GEMS": _setup("GEMS", "bert-48", nodes, 4, 32, batch),
        "DAPPLE": _setup("DAPPLE", "bert-48", nodes, 4, 4, batch),
    }


# Bert-48 and one memory; all of GPT-2's times are predicted. GEMS nearly only computes and waits for what is computed.
CALIBRATION = {
    "network": paper.BERT_32,
    "passes": paper.BERT_RATE["GEMS"],
    "memory": paper.GPT2_MEMORY["Chimera"],
}


def calibrated(points: Mapping[str, Point] = MappingProxyType(CALIBRATION)) -> Calibrated:
    """Calibrated with these figures only."""
    return calibrate(
        known("piz-daint"),
        network=(bert(32)["Chimera"], points["network"]),
        passes=(bert(64)["GEMS"], points["passes"]),
        memory=(gpt2(2048)["Chimera"], points["memory"]),
    )


def choice(model: Calibrated) -> list[Estimate]:
    """Equation 1's estimates for Bert-48 on 32 nodes with a batch of 512, best first."""
    found = choices(bert(32)["Chimera"], (2, 4, 8, 16), model.cluster, model.growth)
    return sorted(found, key=lambda each: each.seconds)


def reproduce(model: Calibrated | None = None) -> Report:
    model = model or calibrated()
    large, small = ({s: _run(setup, model) for s, setup in of.items()} for of in (gpt2(2048), bert(64)))
    rows = [
        *_speedups(large, paper.GPT2_SPEEDUP),
        *_rates(large, paper.GPT2_RATE),
        *(Row(point, _bubble(large[scheme].setup)) for scheme, point in paper.GPT2_BUBBLE.items()),
        *_memories(large),
        *_again(large, paper.GPT2_AGAIN),
        *_scaling(large["Chimera"], model),
        *_speedups(small, paper.BERT_SPEEDUP),
        *_rates(small, paper.BERT_RATE),
        *_again(small, paper.BERT_AGAIN),
        Row(paper.BERT_32, _run(bert(32)["Chimera"], model).throughput),
        *_chosen(choice(model)),
        *_eager(model),
        *_inputs(known("piz-daint")),
    ]
    return Report(
        "chimera",
        "Chimera (Li and Hoefler 2021) on Piz Daint",
        tuple(replace(row, calibrated=row.point in CALIBRATION.values()) for row in rows),
        tuple(_share(f"{name}: {scheme}", each) for name, of in _named(large, small) for scheme, each in of.items()),
        _words(model),
        tuple(point.name for point in (*paper.GPT2_SPEEDUP.values(), *paper.BERT_SPEEDUP.values())),
    )


def _run(setup: Setup, model: Calibrated) -> Run:
    return run(setup, model.cluster, model.growth)


def _named(large: dict[str, Run], small: dict[str, Run]) -> tuple[tuple[str, dict[str, Run]], ...]:
    return ((paper.GPT2, large), (paper.BERT, small))


def _speedups(runs: dict[str, Run], points: dict[str, Point]) -> Iterator[Row]:
    for scheme, point in points.items():
        yield Row(point, runs["Chimera"].throughput / runs[scheme].throughput)


def _rates(runs: dict[str, Run], points: dict[str, Point]) -> Iterator[Row]:
    return (Row(point, runs[scheme].throughput) for scheme, point in points.items())


def _again(runs: dict[str, Run], points: dict[str, Point]) -> Iterator[Row]:
    return (Row(point, float(runs[scheme].recompute)) for scheme, point in points.items())


def _memories(runs: dict[str, Run]) -> Iterator[Row]:
    return (Row(point, runs[scheme].memory / GIB) for scheme, point in paper.GPT2_MEMORY.items())


def _bubble(setup: Setup) -> float:
    """As the paper counts it, from the schedule alone: equal stages, a backward of two forwards; for Chimera, of one."""
    backward = 1.0 if setup.schedule == "chimera" else 2.0
    uniform = Costs.uniform(setup.depth, 1.0, backward / 2, backward / 2)
    schedule = generate(setup.schedule, setup.depth, setup.microbatches)
    return sum(simulate(schedule, uniform).bubble_ratio) / setup.depth


def _scaling(large: Run, model: Calibrated) -> Iterator[Row]:
    base = _run(gpt2(512)["Chimera"], model)
    yield Row(paper.GPT2_WEAK, large.throughput / base.throughput / 4)
    direct = _setup("Chimera", "gpt2-64", 512, 8, 1, 2048)
    doubled = replace(direct, mode="doubling")
    yield Row(paper.GPT2_DOUBLING, _run(doubled, model).throughput / _run(direct, model).throughput)


def _chosen(estimates: list[Estimate]) -> Iterator[Row]:
    best = estimates[0].setup
    return (Row(*each) for each in zip(paper.BERT_CHOICE, (best.width, best.depth, best.size), strict=True))


def _eager(model: Calibrated) -> Iterator[Row]:
    for nodes, point in paper.EAGER_OPT.items():
        setup = bert(nodes)["Chimera"]
        eager = _run(replace(setup, sync=Sync.EAGER), model)
        yield Row(point, _run(setup, model).throughput / eager.throughput)


def _inputs(cluster: Cluster) -> Iterator[Row]:
    """The inputs of the simulation, compared with the authors' repository."""
    block = load("bert-large").kinds[1]
    for (samples, which), point in paper.BLOCK.items():
        here = part(block, samples, 128, cluster.device)
        yield Row(point, 1e3 * (here.forward if which == "forward" else here.backward))
    for (name, depth), point in paper.LARGEST.items():
        setup = _setup("Chimera", name, 32, depth, 1, 32)
        yield Row(point, max(stages(setup, cluster, 2, recompute=False).weights) / ITEM)


def _share(name: str, each: Run) -> Share:
    seconds = {"computed": each.computed, "waited": each.waited, "summed": each.summed, "updated": each.update}
    return Share(name, seconds)


def _words(model: Calibrated) -> tuple[str, ...]:
    found = ", ".join(
        f"(W={e.setup.width}, D={e.setup.depth}, B={e.setup.size}) {e.throughput:.0f}" for e in choice(model)
    )
    gloo, slower, fuller = CALIBRATION["network"], CALIBRATION["passes"], CALIBRATION["memory"]
    return (
        f"Calibrated on three figures, each for one constant: {gloo.name} = {gloo.value:g} for what gloo gets of the network, "
        f"{model.cluster.nic_bandwidth / 1e9:.2f} GB/s; {slower.name} = {slower.value:g} for what a pass takes of the time of "
        f"its kernels, {model.pace:.2f}; {fuller.name} = {fuller.value:g} for the bytes that a byte of activations takes, "
        f"{model.growth:.2f}.",
        "Everything else is predicted. A scheme recomputes where its memory exceeds the P100's without.",
        f"Equation 1 on Bert-48, 32 nodes, batch 512, in sequences/s: {found}.",
    )
