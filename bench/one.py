"""Whole training steps on one rank: our recipes and the peers', timed in turns in one process."""

from __future__ import annotations

import gc
from collections.abc import Mapping
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
from cubeloom.parallel.config import Precision

TRAINED = "cubeloom, as `train` runs it"
FP8 = f"{TRAINED}, FP8"
RECIPES = (*peers.OF_TORCH_ALONE, "cubeloom", "cubeloom, compiled", TRAINED)
ALL = tuple(dict.fromkeys((*peers.RECIPES, *RECIPES, FP8)))
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
    values, network, data = peers.weights(size, dtype, device), Network(Grid(), device), tokens_of(size, device)

    def made(name: str) -> Step:
        if name in peers.RECIPES:
            return peers.step(name, size, values, data)
        if name in (TRAINED, FP8):
            precision: Precision = "fp8" if name == FP8 else "model"
            return train_step(size, values, network, recorded=on_gpu, precision=precision)  # a CPU records nothing
        return our_step(size, values, network, compiled=name != "cubeloom")

    failed: list[str] = []

    def tried(name: str) -> Mapping[str, Step]:
        """The recipe, if it runs: one that leans on other packages may fail, as with a torch that is too new for them."""
        if name not in peers.RECIPES or not peers.RECIPES[name].packages:
            return {name: made(name)}
        try:
            step = made(name)
            step()
        except Exception as error:
            failed.append(f"{name}, which fails: {type(error).__name__}: {error}")
            return {}
        return {name: step}

    timed: list[Timed] = []
    costs: list[energy.Cost] = []
    # On a CPU the compiler would take minutes to no purpose: there it is asked to leave everything as it is.
    with nullcontext() if on_gpu else torch.compiler.set_stance("force_eager"):
        for names in [(name,) for name in chosen] if size.apart else [chosen]:
            recipes = {name: step for each in names for name, step in tried(each).items()}
            timed += take_turns(recipes, device, rounds, steps, profiled=profiled)
            if weighed:
                costs += energy.costs_of(recipes, energy.Chip(), partial(devices.settle, device))
            recipes.clear()
            _free(on_gpu)
    rate = matmul_rate(device, dtype, 8192 if on_gpu else 64)
    ran = [each.name for each in timed]
    against = PEER if PEER in ran else next((name for name in ran if name in peers.RECIPES), ran[0])
    return Compared(title, timed, against, size.tokens, size.teraflops, rate, costs, failed)


def _free(on_gpu: bool) -> None:
    """What nobody holds any more, for recipes that fill a GPU alone."""
    torch.compiler.reset()
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
