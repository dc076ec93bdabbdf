"""GPT over several ranks as torch alone does it: DTensor tensor parallelism, with and without sequences cut, and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from bench.peers.gpt import Size, adamw, gpt

TENSOR = {"torch tensor parallel": False, "torch with sequence parallel": True}  # and whether sequences are cut
SHARDED = {"torch FSDP2 resharding": True, "torch FSDP2": False}
RECIPES = (*TENSOR, *SHARDED)


def plan(layers: int, sequences: bool) -> dict[str, ParallelStyle]:
    stream: Placement = Shard(1) if sequences else Replicate()  # between the layers that are cut
    found: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }
    norms = ["norm"]
    for block in (f"blocks.{number}" for number in range(layers)):
        found |= {f"{block}.{name}": ColwiseParallel(input_layouts=stream) for name in ("qkv", "up")}
        found |= {f"{block}.{name}": RowwiseParallel(output_layouts=stream) for name in ("proj", "down")}
        norms += [f"{block}.norm1", f"{block}.norm2"]
    return found | ({name: SequenceParallel() for name in norms} if sequences else {})


def step(
    name: str, size: Size, values: dict[str, Tensor], mesh: DeviceMesh, tokens: Tensor, targets: Tensor
) -> Callable[[], Tensor]:
    model = gpt(size, values, compiled=False)
    if name in TENSOR:
        # Everybody has drawn the same weights, so that none are sent.
        parallelize_module(model, mesh, plan(size.layers, TENSOR[name]), src_data_rank=None)
    else:
        tokens, targets = (each.chunk(mesh.size())[mesh.get_local_rank()].contiguous() for each in (tokens, targets))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=SHARDED[name])
    optimizer = adamw(model)

    def run() -> Tensor:
        with loss_parallel() if name in TENSOR else nullcontext():
            loss: Tensor = model(tokens, targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = loss.detach()
        return found.to_local() if isinstance(found, DTensor) else found

    return run
