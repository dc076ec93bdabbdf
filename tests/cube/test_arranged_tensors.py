"""What users read of parameters whose rows the ranks hold in another order: the serial model's tensors."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from cubeloom import Grid
from cubeloom.base.errors import UserError
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import GPTConfig, LlamaConfig, build, config, cut_of
from cubeloom.parallel import Batch, apply, initial_values, materialise
from cubeloom.parallel.arranged_tensor import ArrangedTensor

BATCH = Batch(4, 8)
TOKENS = torch.arange(4 * 8).view(4, 8) * 7 % 83
# Padded vocabularies, sections, and copies of keys and values.
SIZES: dict[str, GPTConfig | LlamaConfig] = {
    "padded": replace(cast(GPTConfig, config("gpt-tiny")), vocab=83),
    "sections": replace(cast(LlamaConfig, config("llama-tiny")), vocab=96),
    "copies": replace(cast(LlamaConfig, config("llama-tiny")), vocab=96, kv_heads=2),
}


def trained(size: GPTConfig | LlamaConfig, grid: Grid | None) -> nn.Module:
    with torch.device("meta"):
        model = build(size)
    fill = initial_values(model, 0, torch.float64)
    data = TOKENS, TOKENS
    if grid is None:
        materialise(model, fill)
    else:
        network = Network(grid)
        apply(model, cut_of(model), network, BATCH, fill)
        data = network.share(TOKENS), network.share(TOKENS)
    loss: Tensor = model(*data)
    loss.backward()
    return model


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def read(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """In each of the ways that a user may."""
    named = dict(model.named_parameters())
    ways: dict[str, dict[str, Tensor]] = {
        "parameter": {name: whole(each) for name, each in named.items()},
        "gradient": {name: whole(cast(Tensor, each.grad)) for name, each in named.items()},
        "detached": {name: whole(each.detach() * 1) for name, each in named.items()},
        "data": {name: whole(each.data) for name, each in named.items()},
        "state_dict": {name: whole(each) for name, each in model.state_dict().items() if name in named},
        "copy": {name: whole(each) for name, each in deepcopy(model).named_parameters()},
    }
    model.to(torch.float64)
    ways["moved"] = {name: whole(each) for name, each in model.named_parameters()}
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    ways["updated"] = {name: whole(each) for name, each in model.named_parameters()}
    return ways


def read_on(size: GPTConfig | LlamaConfig, grid: Grid) -> tuple[dict[str, dict[str, Tensor]], int]:
    model = trained(size, grid)
    return read(model), sum(isinstance(each, ArrangedTensor) for each in model.parameters())


@pytest.mark.parametrize(
    ("kind", "grid"),
    [
        ("padded", "y=4"),
        ("sections", "y=2,x=2"),
        ("copies", "y=4"),
        pytest.param("padded", "y=2,z=2", marks=pytest.mark.long),
    ],
)
def test_whole_tensors_are_the_serial_model_s(ranks: RankPool, kind: str, grid: str) -> None:
    expected = ranks.run(1, read_serially, SIZES[kind])[0]
    on = Grid.parse(grid)
    for found, arranged in ranks.run(on.world, read_on, SIZES[kind], on):
        assert arranged > 0
        for way, tensors in found.items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(tensor, expected[way][name], rtol=0, atol=1e-9, msg=f"{way} {name}")


def read_serially(size: GPTConfig | LlamaConfig) -> dict[str, dict[str, Tensor]]:
    return read(trained(size, None))


def refusals(grid: Grid, folder: str) -> list[str]:
    model = trained(SIZES["copies"], grid)
    copied = next(
        each for each in model.parameters() if isinstance(each, ArrangedTensor) and each.arrangement.copies > 1
    )
    said = []
    attempts: list[Any] = [
        lambda: torch.nn.utils.clip_grad_norm_([copied], 1.0),
        lambda: copied.square().sum(),
        lambda: save(dict(model.named_parameters()), checkpoint_id=folder, no_dist=True),
    ]
    for attempt in attempts:
        try:
            attempt()
            said.append("")
        except (UserError, CheckpointException) as error:
            said.append(str(error))
    penalty = copied.full_tensor().square().sum()
    penalty.backward()
    return said


def test_what_would_be_wrong_of_them_is_refused(ranks: RankPool, tmp_path: Any) -> None:
    for norm, total, saved in ranks.run(4, refusals, Grid(y=4), str(tmp_path)):
        assert "several ranks have copies of the same rows" in norm and "cubeloom.clip_grad_norm_" in norm
        assert "would count them several times; use full_tensor()" in total
        assert "use cubeloom.save" in saved
