"""Creates one small batch with which a model can be run to inspect it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from cubeloom.base.errors import UserError

_SAMPLES, _TOKENS = 2, 16
TOKEN_NAMES = ("input_ids", "tokens", "idx", "ids", "token_ids", "x")
TARGET_NAMES = ("labels", "targets", "target", "y")


def example_of(model: nn.Module, samples: int = _SAMPLES, sequence: int | None = None) -> dict[str, Any]:
    """The keyword arguments of one forward. Raises UserError if they cannot be derived from the model."""
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    taken = inspect.signature(model.forward).parameters
    own = getattr(model, "example", None)
    if callable(own):
        return dict(own(samples))
    if config is not None and main is not None:
        found = _of_hugging_face(model, config, main, samples, sequence)
    else:
        found = _of_tokens(model, list(taken), samples, sequence or _TOKENS)
    if found is None:
        raise UserError(
            f"{type(model).__name__}.forward takes {', '.join(taken) or 'nothing'}, of which no example is known: pass"
            " `example`, the keyword arguments of one forward of one rank's samples"
        )
    return {name: each for name, each in found.items() if name in taken}


def _of_hugging_face(
    model: nn.Module, config: Any, main: str, samples: int, sequence: int | None
) -> dict[str, Any] | None:
    text = getattr(config, "text_config", None) or config
    vocabulary = int(getattr(text, "vocab_size", 0) or 0)
    most = int(getattr(text, "max_position_embeddings", 0) or getattr(text, "n_positions", 0) or _TOKENS)
    length = sequence or min(_TOKENS, most)
    dtype = next((each.dtype for each in model.parameters()), torch.float32)
    targets = _tokens(samples, length, vocabulary) if vocabulary else torch.zeros(samples, dtype=torch.long)
    match main:
        case "input_ids":
            return {"input_ids": _tokens(samples, length, vocabulary), "labels": _labels(model, targets)}
        case "pixel_values":
            vision = getattr(config, "vision_config", None) or config
            size = getattr(vision, "image_size", 224)
            height, width = size if isinstance(size, list | tuple) else (size, size)
            pixels = torch.zeros(samples, int(getattr(vision, "num_channels", 3)), height, width, dtype=dtype)
            return {"pixel_values": pixels, "labels": torch.zeros(samples, dtype=torch.long)}
        case "input_features":
            frames = 2 * int(getattr(config, "max_source_positions", 1500))
            features = torch.zeros(samples, int(getattr(config, "num_mel_bins", 80)), frames, dtype=dtype)
            return {"input_features": features, "labels": targets}
    return None


def _labels(model: nn.Module, targets: Tensor) -> Tensor:
    """One label per sample for a model that classifies samples."""
    return torch.zeros(len(targets), dtype=torch.long) if "SequenceClassification" in type(model).__name__ else targets


def _of_tokens(model: nn.Module, taken: list[str], samples: int, sequence: int) -> dict[str, Any] | None:
    """For a user's own model that takes tokens and perhaps targets under usual names."""
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding)]
    tokens = next((name for name in TOKEN_NAMES if name in taken), None)
    if not tables or tokens is None:
        return None
    vocabulary = max(each.num_embeddings for each in tables)
    length = min([sequence, *(each.num_embeddings for each in tables if each.num_embeddings < sequence)])
    least = min(vocabulary, min(each.num_embeddings for each in tables))
    found = {tokens: _tokens(samples, length, least)}
    targets = next((name for name in TARGET_NAMES if name in taken), None)
    if targets is not None:
        found[targets] = _tokens(samples, length, least)
    return found


def _tokens(samples: int, sequence: int, vocabulary: int) -> Tensor:
    return (torch.arange(samples * sequence) % max(1, vocabulary - 3) + min(3, vocabulary - 1)).view(samples, sequence)
