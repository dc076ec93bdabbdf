"""Reads and writes a parallelized model in a user's own training loop: `cubeloom.load`, `save`, `save_pretrained`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from cubeloom.base.errors import UserError
from cubeloom.comm import Network
from cubeloom.models.parallelize import Handle, handle_of
from cubeloom.parallel.arranged import arrangement_of, block_values
from cubeloom.parallel.fp8 import AMAX
from cubeloom.parallel.parameter import Block, block_of, local_of
from cubeloom.tools.convert.hugging_face_folder import (
    HuggingFaceFolder,
    is_hugging_face,
    refuse_more,
    stored_as,
    write_sums,
)
from cubeloom.tools.convert.safetensors_files import SafetensorsFiles
from cubeloom.train.checkpoint import checkpoints, load_checkpoint, load_weights, save_checkpoint
from cubeloom.train.part import Part

SHARD_SIZE = 5 * 10**9


class PlainOptimizer:
    """A torch optimizer on the model's parameters, with the interface that checkpoints use."""

    def __init__(self, optimizer: Optimizer | None, model: nn.Module) -> None:
        self.optimizer = optimizer or torch.optim.SGD([torch.zeros(())])
        given = {id(each) for group in self.optimizer.param_groups for each in group["params"]}
        self.parts = {
            each: Part(each, slice(0, local_of(each).shape[0] if each.dim() else 0), local_of(each))
            for each in model.parameters()
            if id(each) in given
        }


def save(model: nn.Module, folder: str | Path, *, optimizer: Optimizer | None = None, step: int | None = None) -> Path:
    """Write a checkpoint that can be resumed on any mesh; called by all ranks. Returns its folder, `folder/step-…`.

    `step`: the number of updates; by default the optimizer's count.
    """
    handle = handle_of(model)
    of = PlainOptimizer(optimizer, model)
    done = _updates(of.optimizer) if step is None else step
    progress: dict[str, Any] = {"model": type(model).__name__}
    if handle.amax is not None:
        progress[AMAX] = handle.amax.state()
    return save_checkpoint(Path(folder), done, model, of, handle.network, progress)  # type: ignore[arg-type]


def load(model: nn.Module, folder: str | Path, *, optimizer: Optimizer | None = None) -> int:
    """Load a parallelized model; called by all ranks. Each reads its own blocks only. Returns the number of completed
    steps.

    `folder`: one that `save` wrote, whose newest checkpoint is used, or a Hugging Face folder with safetensors.
    """
    handle, path = handle_of(model), Path(folder)
    if is_hugging_face(path):
        if optimizer is not None:
            raise UserError(
                f"{path} is a Hugging Face folder, which has no state of an optimizer: load without `optimizer`"
            )
        names = _names_on_any_rank(model, handle.network)
        handle.network.host_group.agree(lambda: _read(model, path, handle, names))
        step = 0
    else:
        found = [path] if (path / "manifest.json").exists() else checkpoints(path)
        if not found:
            raise UserError(f"{path} has no checkpoint and is no Hugging Face folder (no config.json)")
        of = PlainOptimizer(optimizer, model)
        if optimizer is None:
            load_weights(found[-1], model, of, handle.network)  # type: ignore[arg-type]
            step = 0
        else:
            step, progress = load_checkpoint(found[-1], model, of, handle.network)  # type: ignore[arg-type]
            if handle.amax is not None:
                handle.amax.load(progress.get(AMAX, {}))
    handle.filled = True
    return step


def save_pretrained(model: nn.Module, folder: str | Path, dtype: torch.dtype | None = None) -> None:
    """Write a folder that transformers loads, one whole tensor after another; called by all ranks."""
    handle, path = handle_of(model), Path(folder)
    if not hasattr(handle.config, "save_pretrained"):
        raise UserError(f"{handle.kind} has no configuration of Hugging Face's: use cubeloom.save")
    first = handle.network.rank == 0
    names = _stored_names(model)
    everybody = _of_all_stages(names, handle.network)
    shapes = {
        name: torch.empty(each.shape, dtype=dtype or each.dtype, device="meta") for name, each in everybody.items()
    }
    files = None
    if first:
        path.mkdir(parents=True, exist_ok=True)
        _config_of(model, handle, dtype).save_pretrained(path)
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(path)
        files = SafetensorsFiles(path, shapes, SHARD_SIZE)
    for name, each in everybody.items():
        whole = _from_its_stage(each, names.get(name), handle.network)
        if files is not None:
            files.write(name, whole if dtype is None else whole.to(dtype))
    if files is not None:
        files.finish()
        write_sums(path)
    handle.network.barrier()


def _config_of(model: nn.Module, handle: Handle, dtype: torch.dtype | None) -> Any:
    """With the entries that transformers adds when it saves a model."""
    noted = copy(handle.config)
    noted.architectures = [handle.kind]
    noted.dtype = dtype or next((each.dtype for each in model.parameters()), None)
    return noted


def _whole(tensor: Tensor) -> Tensor:
    """A parameter or buffer as in the serial model; called by all ranks."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    detached = tensor.detach()
    assert isinstance(detached, DTensor)
    return detached.full_tensor()  # of an `ArrangedTensor`, too


@dataclass(frozen=True)
class _Stored:
    """A tensor of the model, and the first pipeline worker that has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    worker: int


def _of_all_stages(names: Mapping[str, Tensor], network: Network) -> dict[str, _Stored]:
    """The tensors on all ranks, in the same order on all."""
    mine = {name: (_whole_shape(each, network), str(each.dtype).removeprefix("torch.")) for name, each in names.items()}
    if network.grid.pipe == 1:
        return {name: _Stored(tuple(shape), getattr(torch, dtype), 0) for name, (shape, dtype) in mine.items()}
    found: dict[str, _Stored] = {}
    places = [network.grid.coordinates(rank)["pipe"] for rank in range(network.grid.world)]
    each_rank = network.host_group.gather(mine)
    for worker, theirs in sorted(zip(places, each_rank, strict=True), key=lambda each: each[0]):
        for name, (shape, dtype) in theirs.items():
            found.setdefault(name, _Stored(tuple(shape), getattr(torch, dtype), worker))
    return found


def _from_its_stage(stored: _Stored, tensor: Tensor | None, network: Network) -> Tensor:
    whole = None if tensor is None else _whole(tensor)
    if network.grid.pipe == 1:
        assert whole is not None
        return whole
    if whole is None or network.coordinates["pipe"] != stored.worker:
        whole = torch.empty(stored.shape, dtype=stored.dtype, device=network.device)
    return network.axis("pipe").broadcast(whole.contiguous(), stored.worker, "save").wait()


def _whole_shape(tensor: Tensor, network: Network) -> list[int]:
    shape, arrangement = list(tensor.shape), arrangement_of(tensor, network)
    if arrangement is not None:
        shape[arrangement.dim] = arrangement.whole
    return shape


def _stored_names(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of `state_dict`, tied tensors once."""
    kept = model.state_dict(keep_vars=True)
    parameters = {name: each for name, each in model.named_parameters() if name in kept}
    return parameters | {name: each for name, each in model.named_buffers() if name in kept}


def _updates(optimizer: Optimizer) -> int:
    return int(max((float(state["step"]) for state in optimizer.state.values() if "step" in state), default=0))


def _names_on_any_rank(model: nn.Module, network: Network) -> set[str]:
    mine = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return set(mine if network.grid.pipe == 1 else chain.from_iterable(network.host_group.gather(mine)))


def _read(model: nn.Module, path: Path, handle: Handle, known: Iterable[str]) -> None:
    folder = HuggingFaceFolder(path)
    parameters, sources = dict(model.named_parameters()), stored_as(folder, model)
    refuse_more(folder, known, handle.kind)
    for name, source in sources.items():
        _fill(parameters[name], folder, source, handle.network)


def _fill(parameter: nn.Parameter, folder: HuggingFaceFolder, source: str, network: Network) -> None:
    arrangement = arrangement_of(parameter, network)
    block = block_of(parameter, network)
    whole = list(block.shape)
    if arrangement is not None:
        whole[arrangement.dim] = arrangement.whole
    stored = tuple(folder.tensors[source].shape)
    if stored != tuple(whole):
        raise UserError(f"{folder.folder} is of another model: {source} is {list(stored)} there and {whole} here")

    def fill(name: str, part: Block) -> Tensor:
        return folder.block(name, part.slices)

    values = fill(source, block) if arrangement is None else block_values(fill, source, block, arrangement)
    with torch.no_grad():
        local_of(parameter).copy_(values)
