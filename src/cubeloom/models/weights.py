"""A model's weights in one safetensors file, with the model's configuration; read block by block."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from cubeloom.base.errors import UserError
from cubeloom.parallel.parameter import Block
from cubeloom.parallel.replace import Fill

_IDENTITY, _CHECKSUM = "cubeloom", "blake2b"  # in the file's metadata


def save_weights(model: nn.Module, path: str | Path) -> None:
    """Write a serial model. Tied tensors are written once."""
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in model.named_parameters()}
    metadata = {_IDENTITY: json.dumps(_identity(model)), _CHECKSUM: _checksum(tensors.items())}
    save_file(tensors, path, metadata=metadata)


def check_weights(path: str | Path, model: nn.Module) -> None:
    """Refuse a file of another model, saying what differs, and a file that has changed since `save_weights` wrote it.
    That requires reading all of it: once per job, not on each rank.
    """
    check_header(path, model)
    with safe_open(path, "pt") as file:
        expected = (file.metadata() or {}).get(_CHECKSUM)
        found = _checksum((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
    if expected is not None and expected != found:
        raise UserError(f"{path} is damaged: its numbers are not those that were written")


def _checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.blake2b()
    for name, tensor in sorted(tensors):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_header(path: str | Path, model: nn.Module) -> None:
    """Refuse a file of another model, saying what differs, without reading its values."""
    try:
        with safe_open(path, "pt") as file:
            stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise UserError(f"no weights at {path}") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}") from None
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if stored == expected:
        return
    made = _whose(metadata, model)
    for title, names in (
        ("lacks", sorted(expected.keys() - stored.keys())),
        ("has besides", sorted(stored.keys() - expected.keys())),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise UserError(f"the weights in {path} are of another model: the file {title} {names[0]}{more}{made}")
    name = next(name for name in expected if stored[name] != expected[name])
    raise UserError(
        f"the weights in {path} are of another model: {name} is {list(stored[name])} there and "
        f"{list(expected[name])} here{made}"
    )


def _whose(metadata: Mapping[str, str], model: nn.Module) -> str:
    """The model that it was written from, if it says so."""
    try:
        whose = json.loads(metadata[_IDENTITY])
        return f" (it was written from a {whose['model']} with {_difference(whose, _identity(model))})"
    except (KeyError, TypeError, ValueError, RecursionError):
        return ""


def stored_values(path: str | Path, model: nn.Module, dtype: torch.dtype, device: torch.device) -> Fill:
    """Fill parameters from a file, reading only the needed block of each tensor."""
    check_header(path, model)

    def fill(name: str, block: Block) -> Tensor:
        with safe_open(path, "pt") as file:
            return file.get_slice(name)[block.slices].to(device, dtype)

    return fill


def _identity(model: nn.Module) -> dict[str, object]:
    config = getattr(model, "config", None)
    identity = {"model": type(model).__name__, **(asdict(config) if config is not None else {})}
    stored: dict[str, object] = json.loads(json.dumps(identity))  # as it is read back: tuples become lists
    return stored


def _difference(theirs: dict[str, object], ours: dict[str, object]) -> str:
    keys = [key for key in theirs if key != "model" and theirs.get(key) != ours.get(key)]
    return ", ".join(f"{key} {theirs[key]}" for key in keys) or "the same configuration"
