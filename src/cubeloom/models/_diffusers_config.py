"""Converts the configuration of a UNet2DModel of Hugging Face's `diffusers` to ours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.models._hugging_face_config import refuse_missing, refuse_options
from cubeloom.models.configs import UNetConfig

KIND = "UNet2DModel"
FIELDS = {
    "image": "sample_size",
    "in_channels": "in_channels",
    "out_channels": "out_channels",
    "res_blocks": "layers_per_block",
    "head_dim": "attention_head_dim",
    "groups": "norm_num_groups",
    "middle_attention": "add_attention",
    "dropout": "dropout",
    "norm_eps": "norm_eps",
    "cosine_first": "flip_sin_to_cos",
    "frequency_shift": "freq_shift",
}
BLOCKS = ("block_out_channels", "down_block_types", "up_block_types")
LEGAL: dict[str, tuple[object, ...]] = {
    "center_input_sample": (False,),
    "time_embedding_type": ("positional",),
    "mid_block_type": ("UNetMidBlock2D",),
    "mid_block_scale_factor": (1,),
    "downsample_padding": (1, 0),
    "downsample_type": ("conv",),
    "upsample_type": ("conv",),
    "act_fn": ("silu", "swish"),
    "resnet_time_scale_shift": ("default",),
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
}


def config_from_diffusers(theirs: Mapping[str, Any]) -> UNetConfig:
    """Our configuration from `dict(model.config)` of theirs. Options that our model does not have are refused.

    Theirs does not define the noise schedule: `steps` and `betas` are DDPM's.
    """
    kind = theirs.get("_class_name", KIND)
    if kind != KIND:
        raise UserError(f"no model here is diffusers' {kind!r}; the one that is: {KIND}")
    refuse_missing(KIND, theirs, [*FIELDS.values(), *BLOCKS])
    widths: list[int] = list(theirs["block_out_channels"])
    refuse_options(
        KIND,
        theirs,
        LEGAL
        | {"time_embedding_dim": (None, 4 * widths[0]), "attn_norm_num_groups": (None, theirs["norm_num_groups"])},
    )
    if not isinstance(theirs["sample_size"], int):
        raise UserError(f"{KIND} with sample_size={theirs['sample_size']!r} is not supported; it must be a number")
    channels = math.gcd(*widths)
    return UNetConfig(
        channels=channels,
        multipliers=tuple(width // channels for width in widths),
        attention=_attention(theirs["down_block_types"], theirs["up_block_types"]),
        pad_after=theirs.get("downsample_padding", 1) == 0,
        **{our: theirs[their] for our, their in FIELDS.items()},
    )


def _attention(down: list[str], up: list[str]) -> tuple[bool, ...]:
    """The levels with attention, which must be the same on the way down and up."""
    found = tuple(kind == "AttnDownBlock2D" for kind in down)
    ours = ["AttnDownBlock2D" if attends else "DownBlock2D" for attends in found]
    mirrored = [kind.replace("Down", "Up") for kind in reversed(ours)]
    if list(down) != ours or list(up) != mirrored:
        raise UserError(
            f"{KIND} with the blocks {', '.join(down)} and {', '.join(up)} is not supported; they must be DownBlock2D or "
            "AttnDownBlock2D, and on the way up the same in reverse"
        )
    return found
