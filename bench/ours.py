"""GPT and Llama with our layers, the same numbers and data as the peers in `bench.peers` have: whole steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.peers.gpt import Size
from bench.peers.llama import EPSILON
from bench.peers.recipes import AnySize
from bench.peers.timing import Step
from cubeloom.comm import Network, devices
from cubeloom.models import GPTConfig, LlamaConfig, build, cut_of
from cubeloom.parallel import Batch, ShardingPolicy, apply
from cubeloom.parallel.config import Precision
from cubeloom.parallel.gradients import Gradients
from cubeloom.parallel.parameter import Block
from cubeloom.parallel.weave import Weave
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.pipeline.runtime.recorded import GraphRecord
from cubeloom.train import BlockOptimizer, ShardedOptimizer
from cubeloom.train.job.settings import OptimizerSettings
from cubeloom.train.optimizers import optimizer_of

FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def number_type(kind: str) -> torch.dtype:
    return torch.float32 if kind == devices.CPU else torch.bfloat16


def tokens_of(size: AnySize, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random tokens, and as targets the ones that follow."""
    numbers = torch.Generator().manual_seed(7)
    drawn = torch.randint(size.vocab, (size.samples, size.sequence + 1), generator=numbers).to(device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def our_step(
    size: AnySize,
    values: dict[str, Tensor],
    network: Network,
    rest: ShardingPolicy | None = None,
    *,
    compiled: bool = False,
    ways: int = 1,
) -> Step:
    """The same with our layers, in a loop as a user of the library writes it."""
    with torch.device("meta"):
        model = build(our_config(size))
    batch = Batch(size.samples, size.sequence)
    state = apply(model, cut_of(model), network, batch, filled(values), rest, compile=compiled)
    optimizer = our_adamw(dict(model.named_parameters()), state.gradients, network)
    tokens, targets = tokens_of(size, network.device)
    data = {"tokens": tokens, "targets": targets}
    run = Weave(model, ways, state.staggers)

    def step() -> Tensor:
        loss = run(**data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def train_step(
    size: AnySize, values: dict[str, Tensor], network: Network, *, recorded: bool, precision: Precision = "model"
) -> Step:
    """The same as `cubeloom train` runs it on one rank, compiled: a pipeline of one stage."""
    with torch.device("meta"):
        model = build(our_config(size))
    pipeline = Pipeline(
        model,
        cut_of(model),
        network,
        Batch(size.samples, size.sequence),
        filled(values),
        generate("gpipe", 1, 1),
        ShardingPolicy(precision=precision),
        compile=True,
        record=GraphRecord() if recorded else None,
    )
    optimizer = our_adamw(pipeline.parameters, pipeline.gradients, network)
    tokens, targets = tokens_of(size, network.device)

    def step() -> Tensor:
        loss = pipeline.launch({"tokens": tokens, "targets": targets})
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def our_adamw(
    parameters: dict[str, nn.Parameter], gradients: Gradients, network: Network
) -> BlockOptimizer | ShardedOptimizer:
    """Without masters, as the peer has none."""
    settings = OptimizerSettings(betas=(0.9, 0.999), weight_decay=0.01, fp32_master_weights=False)
    optimizer = optimizer_of(settings, parameters, gradients, network)
    for group in optimizer.optimizer.param_groups:
        group["lr"] = 1e-4
    return optimizer


def our_sizes(size: AnySize) -> dict[str, Any]:
    """As our models and settings files name them."""
    same = {name: getattr(size, name) for name in ("vocab", "hidden", "layers", "heads")}
    return {**same, "positions": size.sequence, "tied": False}


def our_config(size: AnySize) -> GPTConfig | LlamaConfig:
    if isinstance(size, Size):
        return GPTConfig(**our_sizes(size))
    same = {name: getattr(size, name) for name in ("kv_heads", "mlp_hidden", "rotary_base")}
    return LlamaConfig(**our_sizes(size), **same, norm_eps=EPSILON)


def filled(values: dict[str, Tensor]) -> Callable[[str, Block], Tensor]:
    """The peer's values for our parameters; where ours are fused, the peer's one behind another."""

    def fill(name: str, block: Block) -> Tensor:
        plain = name.replace(".attention.", ".").replace(".mlp.", ".")
        if plain in values:
            return values[plain][block.slices].clone()
        owner, layer, kind = plain.rsplit(".", 2)
        return torch.cat([values[f"{owner}.{part}.{kind}"] for part in FUSED[layer]])[block.slices]

    return fill
