"""Models that others wrote, as a training loop of a user's own has them: serial, and over a mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import cubeloom
from cubeloom.comm import Network
from cubeloom.models.external import InDouble
from cubeloom.parallel.arranged import lie_of
from cubeloom.parallel.parameter import local_of
from zoo.nano import Loss

VOCAB, LENGTH, SAMPLES = 96, 8, 4
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "hidden_size": 32,
    "num_attention_heads": 4,
}
KINDS = ("llama", "gpt2", "bert", "nano")
Theirs = Any  # transformers has no types


def config_of(kind: str) -> Theirs:
    import transformers

    match kind:
        case "llama":
            return transformers.LlamaConfig(
                **_SIZES, num_hidden_layers=1, num_key_value_heads=2, intermediate_size=64, tie_word_embeddings=False
            )
        case "gpt2":
            none: Theirs = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
            return transformers.GPT2Config(
                vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0, **none
            )
        case "bert":
            none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            return transformers.BertConfig(**_SIZES, num_hidden_layers=1, intermediate_size=64, **none)
    raise ValueError(kind)


def untouched(kind: str) -> Theirs:
    """Built where the default device says."""
    import transformers

    if kind == "nano":
        return Loss()
    makers = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM"}
    return getattr(transformers, makers[kind])(config_of(kind))


def build(kind: str, dtype: torch.dtype = torch.float64) -> Theirs:
    torch.manual_seed(0)
    return untouched(kind).to(dtype)


def batches(kind: str, count: int = 3) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        tokens = torch.randint(VOCAB, (SAMPLES, LENGTH), generator=generator)
        ignored = tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.3, -100)
        yield {"idx": tokens, "targets": ignored} if kind == "nano" else {"input_ids": tokens, "labels": ignored}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of models that compute norms and losses in single precision, in double."""
    with InDouble():
        found = model(**batch)
    loss: Tensor = found if isinstance(found, Tensor) else found.loss
    return loss


def train(
    model: nn.Module, kind: str, mesh: Network | None = None, steps: int = 3, clip: float = 0.05
) -> tuple[list[float], list[float]]:
    """Losses, and norms of gradients, which are clipped."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2, eps=1e-3)
    losses, norms = [], []
    for batch in batches(kind, steps):
        loss = loss_of(model, batch if mesh is None else mesh.shard(batch))
        loss.backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
    return losses, norms


def parallelized(model: nn.Module, mesh: Network) -> nn.Module:
    cubeloom.parallelize(model, mesh)
    return model


def apart(model: nn.Module, serial: nn.Module, mesh: Network, *, gradients: bool = False) -> float:
    """How far this rank's blocks are from those of whole tensors."""
    found = [0.0]
    wanted = dict(serial.named_parameters())
    for name, parameter in model.named_parameters():
        mine, whole = (parameter.grad, wanted[name].grad) if gradients else (parameter, wanted[name].detach())
        assert (mine is None) == (whole is None), name
        if mine is None or whole is None:
            continue
        lie = lie_of(parameter, mesh)
        for run, rows in lie.parts(local_of(mine)):
            if run.first is not None:
                offset = lie.offset_of(run)
                part = whole[tuple(slice(at, at + size) for at, size in zip(offset, rows.shape, strict=True))]
                found.append((rows - part).abs().max().item())
    return max(found)


def apart_of(some: list[float], others: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(some, others, strict=True))
