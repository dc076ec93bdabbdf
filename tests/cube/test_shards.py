"""What a rank holds: its block of every parameter, gradient, optimizer state and activation, from the start."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import BERTConfig, Config, GPTConfig, build, config, cut_of
from cubeloom.parallel import Batch, ShardingPolicy, apply, initial_values, materialise
from cubeloom.parallel.arranged import arrangement_of, lie_of
from cubeloom.parallel.parameter import local_of
from grids import MODELS, rest_is_long

BATCH = Batch(4, 24)


def plain(model: Config) -> nn.Module:
    with torch.device("meta"):
        return build(model)


def cut_model(model: Config, grid: Grid, batch: Batch = BATCH, **rest: Any) -> tuple[nn.Module, Network]:
    network = Network(grid)
    skeleton = plain(model)
    fill = initial_values(skeleton, 3, torch.float32)  # type: ignore[arg-type]
    apply(skeleton, cut_of(skeleton), network, batch, fill, ShardingPolicy(**rest))
    return skeleton, network


def serial(model: Config) -> nn.Module:
    skeleton = plain(model)
    return materialise(skeleton, initial_values(skeleton, 3, torch.float32))  # type: ignore[arg-type]


def same_bits(model: Config, grid: Grid) -> bool:
    cut, network = cut_model(model, grid)
    mine, theirs = dict(cut.named_parameters()), dict(serial(model).named_parameters())
    assert mine.keys() == theirs.keys()

    def same(name: str, whole: Tensor) -> bool:
        if arrangement_of(mine[name], network) is None:
            return torch.equal(cast(DTensor, mine[name].data).full_tensor(), whole)
        lie = lie_of(mine[name], network)
        parts = [(lie.offset_of(run), own) for run, own in lie.parts(local_of(mine[name]))]
        return all(
            torch.equal(own, whole[tuple(slice(a, a + n) for a, n in zip(offset, own.shape, strict=True))])
            for offset, own in parts
        )

    return all(same(name, whole.data) for name, whole in theirs.items())


@pytest.mark.parametrize(
    ("model", "grid"),
    rest_is_long(
        product(MODELS, ["x=2,y=2,z=2", "x=3,z=2", "y=4", "data=2,z=2"]),
        [("gpt-tiny", "x=2,y=2,z=2"), ("bert-tiny", "x=3,z=2"), ("llama-tiny", "y=4"), ("gpt-tiny", "data=2,z=2")],
    ),
)
def test_any_grid_starts_from_the_same_model_bit_for_bit(ranks: RankPool, model: str, grid: str) -> None:
    on = Grid.parse(grid)
    assert all(ranks.run(on.world, same_bits, config(model), on))


class Largest(TorchDispatchMode):
    """The largest tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta" and not isinstance(tensor, DTensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def largest_while_cutting(model: Config, grid: Grid) -> int:
    with Largest() as largest:
        cut_model(model, grid)
    return largest.elements


@pytest.mark.slow
def test_no_rank_ever_holds_a_whole_sharded_tensor(ranks: RankPool) -> None:
    """The largest tensor is the table of 4096 × 512; drawing its eighth takes one padded block more."""
    wide = replace(cast(GPTConfig, config("gpt-tiny")), vocab=4096, hidden=512, heads=8)
    whole = 4096 * 512
    assert all(
        largest <= whole // 8 + 256 for largest in ranks.run(8, largest_while_cutting, wide, Grid(x=2, y=2, z=2))
    )


def held(model: Config, grid: Grid) -> dict[str, int]:
    """Elements of parameters, gradients and optimizer state after a step: of matrices, and of biases and norms."""
    cut, _ = cut_model(model, grid)
    optimizer = torch.optim.AdamW(cut.parameters())
    samples = BATCH.samples // grid.z
    tokens = torch.zeros(samples, BATCH.sequence, dtype=torch.long)
    cut(tokens, tokens).backward()
    optimizer.step()
    count = dict.fromkeys(("matrices", "vectors", "gradients", "state"), 0)
    for parameter in cut.parameters():
        matrix = parameter.dim() == 2
        count["matrices" if matrix else "vectors"] += local_of(parameter).numel()
        if matrix:
            assert parameter.grad is not None
            count["gradients"] += local_of(parameter.grad).numel()
            moments = optimizer.state[parameter]
            count["state"] += sum(local_of(moments[name]).numel() for name in ("exp_avg", "exp_avg_sq"))
    return count


@pytest.mark.parametrize("grid", rest_is_long(["x=2,y=2,z=2", "z=4", "x=4", "y=2,z=2"], ["x=4", "y=2,z=2"]))
def test_parameters_gradients_and_optimizer_state_are_one_part_in_xyz(ranks: RankPool, grid: str) -> None:
    """All matrices, tables included. Biases and norms, a hundredth of them here, are cut over one axis only."""
    on = Grid.parse(grid)
    shapes = [tuple(parameter.shape) for parameter in plain(config("gpt-tiny")).parameters()]
    matrices = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    vectors = sum(shape[0] for shape in shapes if len(shape) == 1)
    for count in ranks.run(on.world, held, config("gpt-tiny"), on):
        assert count["matrices"] == matrices // on.world
        assert count["gradients"] == count["matrices"]
        assert count["state"] == 2 * count["matrices"]
        assert count["vectors"] <= vectors


def activations(model: Config, grid: Grid | None, rest: dict[str, Any]) -> tuple[dict[str, int], int]:
    """Elements of what each layer gives, and bytes of all that autograd saves for the backward, without parameters."""
    cut = serial(model) if grid is None else cut_model(model, grid, BATCH, **rest)[0]
    on = grid or Grid()
    sizes: dict[str, int] = {}
    for name, module in cut.named_modules():
        # Between the layers: norms, residual adds, activation functions, attention.
        if name.endswith(("norm1", "norm2", "mlp.up", "mlp.act", "mlp", "core", "qkv", "proj", "head", "embed")):
            module.register_forward_hook(lambda _, __, out, name=name: sizes.__setitem__(name, out.numel()))
    parameters = {local_of(each).untyped_storage().data_ptr() if grid else each.data_ptr() for each in cut.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.zeros(BATCH.samples // on.z, BATCH.sequence, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = cut(tokens, tokens)
        total = sum(saved.values())  # while the loss, and so all that is saved, is alive
    del loss
    return sizes, total


@pytest.mark.parametrize("grid", rest_is_long(["x=2,y=2,z=2", "y=4", "x=2,y=2", "x=4,y=2"], ["x=2,y=2,z=2", "y=4"]))
def test_activations_at_rest_are_one_part_in_xyz(ranks: RankPool, grid: str) -> None:
    on = Grid.parse(grid)
    (whole, whole_saved), *_ = ranks.run(1, activations, config("gpt-tiny"), None, {})
    for sizes, saved in ranks.run(on.world, activations, config("gpt-tiny"), on, {"inputs": "regathered"}):
        assert sizes == {name: size // on.world for name, size in whole.items()}
        # With inputs of linears kept as shards, all that waits for the backward is a part in xyz, but for two numbers a row
        # of each norm; a serial norm keeps its input where ours keeps its result, so that sizes compare but roughly.
        assert saved <= 1.1 * whole_saved / on.world


def replicated_activations(model: Config, grid: Grid) -> dict[str, int]:
    return activations(model, grid, {"activations": "replicated"})[0]


@pytest.mark.slow
def test_replicated_activations_rest_on_every_rank_of_the_axis_that_does_not_index_them(ranks: RankPool) -> None:
    (whole, _), *_ = ranks.run(1, activations, config("gpt-tiny"), None, {})
    sizes = ranks.run(8, replicated_activations, config("gpt-tiny"), Grid(x=2, y=2, z=2))[0]
    stream = {name for name in sizes if name.endswith(("norm1", "norm2", "mlp", "proj", "embed"))}
    inner = {name for name in sizes if name.endswith(("mlp.up", "mlp.act"))}
    attention = sizes.keys() - stream - inner
    assert {name: sizes[name] for name in stream | inner} == {name: whole[name] // 4 for name in stream | inner}
    assert {name: sizes[name] for name in attention} == {name: whole[name] // 8 for name in attention}


def norm_and_clip(model: Config, grid: Grid | None) -> tuple[float, float]:
    cut = serial(model) if grid is None else cut_model(model, grid)[0]
    on = grid or Grid()
    tokens = torch.arange(BATCH.samples * BATCH.sequence).view(BATCH.samples, -1) % 384
    mine = tokens.chunk(on.z)[Network(on).coordinates["z"] if grid else 0]
    cut(mine, mine).backward()
    norm = nn.utils.clip_grad_norm_(cut.parameters(), 0.01)
    clipped = nn.utils.get_total_norm([each.grad for each in cut.parameters() if each.grad is not None])
    return tuple((each.full_tensor() if isinstance(each, DTensor) else each).item() for each in (norm, clipped))  # type: ignore[return-value]


@pytest.mark.slow
def test_torch_clips_the_gradients_as_they_are(ranks: RankPool) -> None:
    ((norm, clipped),) = ranks.run(1, norm_and_clip, config("gpt-tiny"), None)
    for theirs, after in ranks.run(8, norm_and_clip, config("gpt-tiny"), Grid(x=2, y=2, z=2)):
        assert theirs == pytest.approx(norm, rel=1e-5)
        assert after == pytest.approx(clipped, rel=1e-5)


def save(folder: str, model: Config, grid: Grid) -> None:
    save_checkpoint({"model": cut_model(model, grid)[0].state_dict()}, checkpoint_id=folder)


def load(folder: str, model: Config, grid: Grid) -> bool:
    """Into a model that starts from zeros; then as it was saved."""
    cut, _ = cut_model(model, grid, Batch(12, 24))
    with torch.no_grad():
        for parameter in cut.parameters():
            local_of(parameter).zero_()
    load_checkpoint({"model": cut.state_dict()}, checkpoint_id=folder)
    theirs = dict(serial(model).named_parameters())
    return all(
        torch.equal(cast(DTensor, each.data).full_tensor(), theirs[name].data) for name, each in cut.named_parameters()
    )


@pytest.mark.slow
def test_torch_checkpoints_load_on_another_grid(ranks: RankPool, tmp_path: Path) -> None:
    model = replace(cast(BERTConfig, config("bert-tiny")), next_sentence=True)
    ranks.run(8, save, str(tmp_path), model, Grid(x=2, y=2, z=2))
    assert all(ranks.run(6, load, str(tmp_path), model, Grid(z=3, x=2)))
    assert all(ranks.run(1, load, str(tmp_path), model, Grid()))
