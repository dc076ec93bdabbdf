"""Parameters that are replicated along an axis stay bit-equal on a GPU, though its attention does not repeat its rounding."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers import LlamaConfig, LlamaForCausalLM

import cubeloom
from cubeloom import Grid
from cubeloom.comm import Network, devices
from cubeloom.models import build, cut_of
from cubeloom.parallel import Batch, ShardingPolicy, apply, initial_values
from cubeloom.parallel.parameter import local_of
from cubeloom.parallel.products import add_product
from on_a_gpu import NEEDS_GPU, GpuRanks

pytestmark = NEEDS_GPU

STEPS = 6


def theirs(network: Network) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    size = LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(size).bfloat16()
    tokens = torch.arange(4 * 512).view(4, 512) * 7 % 128
    example = {"input_ids": tokens, "labels": tokens}
    cubeloom.parallelize(model, network, example=example)
    data = {name: each.cuda() for name, each in example.items()}
    return model, lambda: model(**data).loss


def ours(network: Network) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        model = build("gpt-tiny")
    fill = initial_values(model, 0, torch.bfloat16, network.device)
    apply(model, cut_of(model), network, Batch(4, 64), fill, ShardingPolicy(activations="replicated"))
    tokens = torch.arange(4 * 64, device=network.device).view(4, 64) * 7 % 384
    return model, lambda: model(tokens, tokens.roll(-1, 1))


def digests(make: Any, grid: Grid) -> dict[str, str]:
    """Of the bits of each parameter that no axis cuts, after some steps."""
    network = Network(grid, devices.current("cuda"))
    model, loss_of = make(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: hashlib.blake2b(local_of(each).cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, each in model.named_parameters()
        if isinstance(each, DTensor) and not any(isinstance(place, Shard) for place in _cut(each))
    }


def _cut(parameter: DTensor) -> list[Any]:
    sizes = parameter.device_mesh.shape
    return [place for place, size in zip(parameter.placements, sizes, strict=True) if size > 1]


@pytest.mark.parametrize("make", [theirs, ours])
def test_replicas_stay_bit_equal(gpu_ranks: GpuRanks, make: Any) -> None:
    first, second = gpu_ranks(2).run(2, digests, make, Grid(y=2), timeout=150)
    assert first and first == second


def products() -> list[float]:
    """Of bfloat16 in float32, alone and added to an earlier one: errors relative to float64."""
    torch.manual_seed(0)
    left, right = torch.randn(64, 512, device="cuda").bfloat16(), torch.randn(512, 96, device="cuda").bfloat16()
    exact = left.double() @ right.double()
    alone = add_product(None, left, right, torch.float32)
    twice = add_product(alone.clone(), left, right, torch.float32)
    both = ((alone, exact), (twice, 2 * exact))
    return [((found.double() - wanted).norm() / wanted.norm()).item() for found, wanted in both]


def test_products_of_bfloat16_are_float32_where_gradients_are(gpu_ranks: GpuRanks) -> None:
    assert max(gpu_ranks(1).run(1, products)[0]) < 1e-6
