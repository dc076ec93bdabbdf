"""Whole training steps on one rank: our recipes and the peers', timed in turns in one process."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from bench import energy
from bench.ours import number_type, our_step, tokens_of, train_step
from bench.peers import recipes as peers
from bench.peers.recipes import PEER, AnySize
from bench.peers.timing import Compared, Step, Timed, matmul_rate, take_turns
from cubeloom import Grid
from cubeloom.comm import Network, devices

TRAINED = "cubeloom, as `train` runs it"
RECIPES = (*peers.OF_TORCH_ALONE, "cubeloom", "cubeloom, compiled", TRAINED)
ALL = tuple(dict.fromkeys((*peers.RECIPES, *RECIPES)))
# The strongest of each, that fit a GPU of 140 GB together.
CHOSEN = (*(name for name in peers.RECIPES if name != "torch"), TRAINED)


def measure_one(
    title: str,
    size: AnySize,
    kind: devices.Kind,
    chosen: tuple[str, ...],
    rounds: int,
    steps: int,
    profiled: bool,
    weighed: bool,
) -> Compared:
    device, dtype, on_gpu = devices.current(kind), number_type(kind), kind != devices.CPU
    timed: list[Timed] = []
    costs: list[energy.Cost] = []
    # On a CPU the compiler would take minutes to no purpose: there it is asked to leave everything as it is.
    with nullcontext() if on_gpu else torch.compiler.set_stance("force_eager"):
        for recipes in _made(size, device, dtype, chosen, on_gpu):
            timed += take_turns(recipes, device, rounds, steps, profiled=profiled)
            if weighed:
                costs += energy.costs_of(recipes, energy.Chip(), partial(devices.settle, device))
    rate = matmul_rate(device, dtype, 8192 if on_gpu else 64)
    against = PEER if PEER in chosen else next((name for name in chosen if name in peers.RECIPES), chosen[0])
    return Compared(title, timed, against, size.tokens, size.teraflops, rate, costs)


def _made(
    size: AnySize, device: torch.device, dtype: torch.dtype, chosen: Sequence[str], on_gpu: bool
) -> Iterator[Mapping[str, Step]]:
    """All recipes at once, to take turns; one after another where they do not fit together."""
    values = peers.weights(size, dtype, device)
    network, data = Network(Grid(), device), tokens_of(size, device)

    def make(name: str) -> Step:
        if name in peers.RECIPES:
            return peers.step(name, size, values, data)
        if name == TRAINED:
            return train_step(size, values, network, recorded=on_gpu)  # a CPU records nothing
        return our_step(size, values, network, compiled=name != "cubeloom")

    if not getattr(size, "apart", False):
        yield {name: make(name) for name in chosen}
        return
    for name in chosen:
        yield {name: make(name)}
        torch.compiler.reset()
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
