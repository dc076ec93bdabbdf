"""Pieces of code between the layers of `small_models`, wrong on parts of tensors and right on whole ones; and right ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from small_models import HEADS, SEQUENCE, VOCAB, WIDTH, Code, heads_apart
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Piece:
    """`says` is in the refusal; `trains`: without the check it trains, and otherwise than the serial model does."""

    place: str
    code: Code
    says: str = ""
    trains: bool = False
    grid: str = "x=2,y=2"


def three_parts(qkv: Tensor) -> Tensor:
    """Queries, keys and values one behind the other, as most write it."""
    query, key, value = (
        each.unflatten(0, (-1, SEQUENCE)).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        for each in qkv.chunk(3, -1)
    )
    mixed = functional.scaled_dot_product_attention(query, key, value)
    return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


def three_parts_viewed(qkv: Tensor) -> Tensor:
    query, key, value = qkv.unflatten(0, (-1, SEQUENCE)).unflatten(-1, (3, -1, WIDTH // HEADS)).unbind(2)
    mixed = functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (query, key, value)))
    return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


def by_hand(qkv: Tensor, scale: float, mask: Any = None) -> Tensor:
    query, key, value = heads_apart(qkv)
    scores = query @ key.transpose(-2, -1) * scale
    if mask is not None:
        scores = mask(scores)
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2).flatten(0, 1)


def causal(scores: Tensor) -> Tensor:
    length = scores.shape[-1]
    seen = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()
    return scores.masked_fill(~seen, float("-inf"))


def slopes(scores: Tensor) -> Tensor:
    """ALiBi, numbered over the heads that are there."""
    heads = torch.arange(1, scores.shape[1] + 1, device=scores.device)
    return scores - 0.1 * heads[:, None, None] * torch.arange(SEQUENCE, device=scores.device)


def scaled_by_all(qkv: Tensor) -> Tensor:
    return by_hand(qkv, (qkv.shape[-1] / 3) ** -0.5)


def over_samples(qkv: Tensor) -> Tensor:
    """Attention among the samples."""
    query, key, value = (each.permute(2, 1, 0, 3) for each in heads_apart(qkv))
    mixed = functional.scaled_dot_product_attention(query, key, value)
    return mixed.permute(2, 0, 1, 3).flatten(2).flatten(0, 1)


def among_heads(qkv: Tensor) -> Tensor:
    query, key, value = (each.transpose(1, 2) for each in heads_apart(qkv))  # [samples, sequence, heads, features]
    return functional.scaled_dot_product_attention(query, key, value).flatten(2).flatten(0, 1)


def heads_in_other_order(qkv: Tensor) -> Tensor:
    mixed = functional.scaled_dot_product_attention(*heads_apart(qkv))
    return mixed.permute(0, 2, 3, 1).flatten(2).flatten(0, 1)


def gram(x: Tensor) -> Tensor:
    return x + (x @ x.t() / 10).tanh() @ x


def rotated_features(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def scaled_by_width(x: Tensor, *_: Any) -> Tensor:
    return x * x.shape[-1] ** 0.5


def numbered(x: Tensor, *_: Any) -> Tensor:
    return x + torch.arange(x.shape[-1], device=x.device)


def numbered_rows(x: Tensor, *_: Any) -> Tensor:
    return x + torch.linspace(0, 1, len(x), device=x.device)[:, None]


def branches(x: Tensor, *_: Any) -> Tensor:
    return x.tanh() if x.shape[-1] >= WIDTH else x.sigmoid()


def loops(x: Tensor, *_: Any) -> Tensor:
    for _number in range(x.shape[0] // 8):
        x = x * 1.1
    return x


def masked_by_values(x: Tensor) -> Tensor:
    return x / x.detach().abs().max().item()


def gate_of_rows(x: Tensor) -> Tensor:
    """A number for each row, from its first features."""
    return x * x[:, :1].sigmoid()


def pairs_by_place(x: Tensor) -> Tensor:
    """Those that are told apart by whether their place is odd, in halves."""
    return torch.cat((x[:, 0::2], x[:, 1::2]), -1)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * gradient.shape[-1]


class Centred(torch.autograd.Function):
    """Of which only the backward mixes features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(-1, keepdim=True)


class Swish(torch.autograd.Function):
    """It keeps what it gives and something between for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        between = (scale * x).sigmoid()
        result = x * between
        ctx.save_for_backward(between, result)
        ctx.scale = scale
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        between, result = ctx.saved_tensors
        return gradient * (between + ctx.scale * result * (1 - between)), None


class Reversed(torch.autograd.Function):
    """It gives what it takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


def own_loss(logits: Tensor, targets: Tensor) -> Tensor:
    picked = logits.log_softmax(-1).gather(-1, targets[:, None])
    return -picked.mean()


def mean_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.square().mean()


def sum_of_logits(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.square().sum()


def squared(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(logits, torch.zeros_like(logits))


def shifted(logits: Tensor) -> Tensor:
    return logits - logits.amax(-1, keepdim=True)


def written_into(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, : x.shape[-1] // 2] = x[:, x.shape[-1] // 2 :]
    return out


KEPT: dict[str, Tensor] = {}


def kept(x: Tensor, *_: Any) -> Tensor:
    return x / KEPT.setdefault("scale", x.detach().abs() + 1)


def masked_rows(x: Tensor, tokens: Tensor, _: Any) -> Tensor:
    """The rows of one token, where the rows of tokens are those of a rank of data and z."""
    x = x.clone()
    x[tokens.flatten() == 3] = 0
    return x


def weight_outside(x: Tensor, _: Tensor, model: Any) -> Tensor:
    return x * model.norm.weight


WRONG: dict[str, Piece] = {
    # Features reordered, in attention and between layers.
    "chunk(3) of features": Piece("core", three_parts, "chunk over dimension 1", trains=True, grid="y=2"),
    "chunk(3) of features by x": Piece("core", three_parts, "chunk over dimension 1"),
    "a view as (3, heads, features)": Piece("core", three_parts_viewed, "unflatten"),
    "heads behind their features": Piece("core", heads_in_other_order, "layer proj"),
    "halves of features rotated": Piece("inner", rotated_features, "chunk over dimension 1", trains=True),
    "flip of features": Piece("inner", lambda x: x.flip(-1), "flip over dimension 1", trains=True),
    "flip of rows": Piece("inner", lambda x: x.flip(0), "flip over dimension 0", trains=True),
    "roll of features": Piece("stream", lambda x, *_: x.roll(1, -1), "roll over dimension 1", trains=True),
    "roll of all": Piece("stream", lambda x, *_: x.roll(1), "roll over dimension 0", trains=True),
    "a cat of halves": Piece("inner", pairs_by_place, "an index into dimension 1", trains=True),
    "groups of features transposed": Piece(
        "inner", lambda x: x.unflatten(-1, (2, -1)).transpose(1, 2).flatten(1), "unflatten", trains=True
    ),
    "groups of features transposed by -1": Piece(
        "inner", lambda x: x.unflatten(-1, (-1, 2)).transpose(1, 2).flatten(1), "layer down", trains=True
    ),
    "rows transposed": Piece(
        "stream", lambda x, *_: x.unflatten(0, (SEQUENCE, -1)).transpose(0, 1).flatten(0, 1), "unflatten", trains=True
    ),
    "a view of all": Piece("inner", lambda x: x.reshape(x.shape[1], x.shape[0]).t().contiguous(), "layer down"),
    "a part assigned to": Piece("inner", written_into, "an index into dimension 1", trains=True),
    "sorted features": Piece("inner", lambda x: x.sort(-1)[0], "sort over dimension 1", trains=True),
    # Reductions and the like over what is cut.
    "softmax over features": Piece("inner", lambda x: x.softmax(-1), "softmax over dimension 1", trains=True),
    "F.softmax over features": Piece("stream", lambda x, *_: functional.softmax(x, dim=1), "softmax over", trains=True),
    "log_softmax over rows": Piece("inner", lambda x: x.log_softmax(0), "log_softmax over dimension 0", trains=True),
    "mean over rows": Piece("inner", lambda x: x - x.mean(0), "mean over dimension 0", trains=True),
    "mean over features": Piece("inner", lambda x: x - x.mean(-1, keepdim=True), "mean over dimension 1", trains=True),
    "sum over all": Piece("stream", lambda x, *_: x / (1 + x.square().sum()), "sum over dimension 0", trains=True),
    "largest of all": Piece("inner", lambda x: x - x.max(), "max over dimension 0", trains=True),
    "largest feature": Piece("inner", lambda x: x - x.max(-1, keepdim=True)[0], "max over dimension 1", trains=True),
    "norm of features": Piece("inner", lambda x: x / (x.norm(dim=-1, keepdim=True) + 1), "norm over", trains=True),
    "F.normalize": Piece("stream", lambda x, *_: functional.normalize(x, dim=-1), "normalize over", trains=True),
    "F.layer_norm": Piece("stream", lambda x, *_: functional.layer_norm(x, x.shape[-1:]), "layer_norm", trains=True),
    "spread of features": Piece("inner", lambda x: x / (1 + x.std(-1, keepdim=True)), "std over", trains=True),
    "running sum of rows": Piece("inner", lambda x: x.cumsum(0) / 10, "cumsum over dimension 0", trains=True),
    "topk": Piece("inner", lambda x: x * (x >= x.topk(2, -1)[0][:, -1:]), "topk over dimension 1", trains=True),
    "glu": Piece("inner", lambda x: functional.glu(torch.cat((x, x), -1), -1), "cat over dimension 1"),
    "first feature": Piece("inner", gate_of_rows, "an index into dimension 1", trains=True),
    # Products.
    "a product of rows": Piece("inner", gram, "its inner dimension"),
    "einsum of features": Piece("inner", lambda x: x * torch.einsum("rf,rf->r", x, x)[:, None], "its inner dimension"),
    "attention among samples": Piece("core", over_samples, "attend to its own part", grid="z=2", trains=True),
    "attention among heads": Piece("core", among_heads, "attend to its own part", trains=True),
    # Numbers from sizes.
    "scaled by the width": Piece("stream", scaled_by_width, "a number made from the size", trains=True),
    "scores scaled by all features": Piece("core", scaled_by_all, "a number made from the size", trains=True),
    "features numbered": Piece("inner", numbered, "each rank would begin at 0", trains=True),
    "rows numbered": Piece("stream", numbered_rows, "each rank would begin at 0", trains=True),
    "heads numbered": Piece("core", lambda qkv: by_hand(qkv, 1.0, slopes), "each rank would begin at 0", trains=True),
    "other code by size": Piece("stream", branches, "the model runs other code", trains=True),
    "a loop over a size": Piece("stream", loops, "the model runs other code", trains=True),
    "positions of a part": Piece(
        "places", lambda tokens: torch.arange(tokens.numel()) % SEQUENCE, "each rank would begin at 0", grid="data=2"
    ),
    # Randomness and values.
    "F.dropout": Piece("stream", lambda x, *_: functional.dropout(x, 0.1), "dropout draws random numbers", trains=True),
    "noise": Piece("inner", lambda x: x + torch.randn_like(x), "randn_like draws random numbers", trains=True),
    "dropped attention": Piece(
        "core",
        lambda qkv: (
            functional.scaled_dot_product_attention(*heads_apart(qkv), dropout_p=0.5)
            .transpose(1, 2)
            .flatten(2)
            .flatten(0, 1)
        ),
        "scaled_dot_product_attention draws random numbers",
        trains=True,
    ),
    "a value as a number": Piece("inner", masked_by_values, "item asks for values", trains=True),
    "a value decides": Piece("inner", lambda x: x if (x > 0).all() else -x, "asks for values"),
    "a mask as an index": Piece("inner", lambda x: x[x > 0].sum() * x, "asks for values", trains=True),
    # What cannot be seen.
    "a backward by size": Piece("inner", Doubled.apply, "a number made from the size", trains=True),
    "a backward over features": Piece("inner", Centred.apply, "mean over dimension 1", trains=True),
    "a tensor from the call before": Piece("stream", kept, "was kept from an earlier call"),
    "rows by a mask": Piece("stream", masked_rows, "assignment by a mask", grid="y=2"),
    "a weight outside of its layer": Piece("stream", weight_outside, "uses norm.weight outside of its layer"),
    "no rule": Piece("inner", lambda x: x / torch.linalg.matrix_norm(x), "has no rule"),
    # Losses that the cut does not know.
    "F.cross_entropy": Piece("loss", functional.cross_entropy, "cross_entropy of", grid="y=2"),
    "F.cross_entropy of a part of the rows": Piece("loss", functional.cross_entropy, "Loss()", grid="data=2"),
    "a loss by hand": Piece("loss", own_loss, "log_softmax over dimension 1", trains=False),
    "a mean of logits": Piece("loss", mean_of_logits, "SquaredLoss()", trains=True),
    "a sum of logits": Piece("loss", sum_of_logits, "sum over dimension 0", trains=True),
    "F.mse_loss": Piece("loss", squared, "mse_loss of", trains=True),
    "shifted logits": Piece("logits", shifted, "amax over dimension 1", grid="y=2"),
    # Broadcasts.
    "rows against rows": Piece(
        "inner", lambda x: x * (x[:, None].detach() > x[None].detach()).sum((1, 2)).shape[0], "joins two dimensions"
    ),
}


def constant(x: Tensor, *_: Any) -> Tensor:
    ones = torch.ones(len(x), x.shape[-1], dtype=x.dtype, device=x.device)
    return x + 0.5 * ones


def in_groups(x: Tensor) -> Tensor:
    """A softmax within groups of two features, of which a rank has whole ones."""
    return x.unflatten(-1, (-1, 2)).softmax(-1).flatten(-2)


def by_mask(x: Tensor) -> Tensor:
    x = x.clone()
    x[x < 0] = 0.5
    return x


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.mul_(2).add_(1)
    y[:] = y.tanh()
    return functional.relu(y, inplace=True)


def assigned(x: Tensor) -> Tensor:
    grouped = x.unflatten(-1, (-1, 2))
    out = torch.empty_like(grouped)
    out[..., 0], out[..., 1] = grouped[..., 1], -grouped[..., 0]
    return out.flatten(-2)


def rotary(qkv: Tensor) -> Tensor:
    query, key, value = heads_apart(qkv)
    angles = torch.arange(SEQUENCE, device=qkv.device)[:, None].to(qkv.dtype)
    cos, sin = angles.cos(), angles.sin()

    def turned(each: Tensor) -> Tensor:
        left, right = each.chunk(2, -1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    mixed = functional.scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True)
    return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


def einsums(qkv: Tensor) -> Tensor:
    query, key, value = heads_apart(qkv)
    scores = causal(torch.einsum("bhqd,bhkd->bhqk", query, key)).softmax(-1)
    return torch.einsum("bhqk,bhkd->bqhd", scores, value).reshape(-1, value.shape[1] * value.shape[3])


def along_the_sequence(qkv: Tensor) -> Tensor:
    """A moving average over the tokens before."""
    return qkv.unflatten(0, (-1, SEQUENCE)).cumsum(1).flatten(0, 1)[:, : qkv.shape[1]].unflatten(-1, (-1, 3)).mean(-1)


def recomputed(x: Tensor) -> Tensor:
    found: Tensor = checkpoint(functional.gelu, x, use_reentrant=False)
    return found


def by_token(x: Tensor, *_: Any) -> Tensor:
    return torch.where(x > 0, x, 0.1 * x).clamp(max=3).to(x.dtype).contiguous()


RIGHT: dict[str, Piece] = {
    "attention by hand": Piece("core", lambda qkv: by_hand(qkv, 0.7, causal)),
    "rotary positions": Piece("core", rotary),
    "einsums": Piece("core", einsums),
    "moving averages": Piece("core", along_the_sequence),
    "softmax in whole groups": Piece("inner", in_groups),
    "changed in its place": Piece("inner", in_place),
    "assigned to": Piece("inner", assigned),
    "recomputed": Piece("inner", recomputed),
    "a tensor of ones": Piece("stream", constant),
    "one number by one": Piece("stream", by_token),
    "positions expanded": Piece(
        "places", lambda tokens: torch.arange(SEQUENCE).expand(len(tokens), SEQUENCE).reshape(-1)
    ),
    "rows by a mask": Piece("stream", masked_rows, grid="z=2"),
    "numbers by a mask": Piece("inner", by_mask),
    "positions of zeros": Piece("places", lambda tokens: (torch.zeros_like(tokens) + torch.arange(SEQUENCE)).flatten()),
    "logits scaled": Piece("logits", lambda logits: logits / VOCAB**0.5),
    "autograd functions": Piece("inner", lambda x: Reversed.apply(Swish.apply(x, 1.5))),
}


def only_apart(time: Tensor, _: Any) -> Tensor:
    return time


def twice(time: Tensor, model: Any) -> Tensor:
    return model.shared(time) + time


def gated(x: Tensor) -> Tensor:
    """A number for each feature of a sample, from its pixels."""
    return x * x.mean((2, 3), keepdim=True).sigmoid()


def gated_by_all(x: Tensor) -> Tensor:
    return x * x.mean((1, 2, 3), keepdim=True).sigmoid()


def blurred(x: Tensor) -> Tensor:
    kernel = torch.ones(x.shape[1], 1, 3, 3, dtype=x.dtype, device=x.device) / 9
    return functional.conv2d(x, kernel, padding=1, groups=x.shape[1])


def channels_paired(x: Tensor) -> Tensor:
    return functional.interpolate(functional.pixel_shuffle(x, 2), scale_factor=0.5).repeat_interleave(4, 1)


def of_images(images: Tensor, prediction: Tensor) -> Tensor:
    return functional.mse_loss(images, prediction)


IMAGE_WRONG: dict[str, Piece] = {
    "no CopyToRegion": Piece("time", only_apart, "nothing sums the gradients"),
    "a Share and what it shares": Piece("time", twice, "joins a tensor of whose gradient"),
    "features joined one behind the other": Piece(
        "joined", lambda a, b: torch.cat((a, b), 1), "cat over dimension 1", trains=True
    ),
    "a mean of all features": Piece("inner", gated_by_all, "mean over dimension 1", trains=True),
    "a mean of samples": Piece("inner", lambda x: x - x.mean(0), "mean over dimension 0", trains=True),
    "F.batch_norm": Piece(
        "inner", lambda x: functional.batch_norm(x, None, None, training=True), "batch_norm over", trains=True
    ),
    "F.group_norm": Piece("inner", lambda x: functional.group_norm(x, 1), "group_norm over", trains=True),
    "a fixed kernel": Piece("inner", blurred, "conv2d is given"),
    "pixels of features": Piece("inner", channels_paired, "pixel_shuffle of"),
    "pooling of features": Piece(
        "inner", lambda x: x * functional.max_pool3d(x[:, None], (4, 1, 1))[:, 0].repeat(1, 4, 1, 1), "max_pool3d"
    ),
    "F.mse_loss": Piece("loss", of_images, "SquaredLoss()"),
}
IMAGE_RIGHT: dict[str, Piece] = {
    "a gate for each feature": Piece("inner", gated),
    "pooled and back": Piece(
        "inner", lambda x: x + functional.interpolate(functional.avg_pool2d(x, 2), scale_factor=2.0, mode="nearest")
    ),
    "padded and cut off": Piece("inner", lambda x: functional.pad(x, (1, 0, 0, 1))[..., 1:, :6]),
    "softmax of pixels": Piece("inner", lambda x: x.flatten(2).softmax(-1).unflatten(2, (6, 6)) * 9),
    "a CopyToRegion, changed": Piece("time", lambda time, model: torch.tanh(model.shared(time)) * 2),
}
