"""Models as Hugging Face and diffusers have them, small, with random weights; what they are given, and their loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor, nn

Inputs = dict[str, Any]
Theirs = Any  # transformers and diffusers have no types

VOCAB, LENGTH = 64, 8
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2() -> Theirs:
    quiet: dict[str, Any] = {
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = transformers.GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=4, **quiet)
    return transformers.GPT2LMHeadModel(config)


def llama() -> Theirs:
    options: dict[str, Any] = {"num_key_value_heads": 2, "attn_implementation": "eager", **SIZES}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **options)
    )


def bert() -> Theirs:
    config = transformers.BertConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **SIZES, **NO_DROPOUT)
    return transformers.BertForMaskedLM(config)


def vit() -> Theirs:
    options: dict[str, Any] = {"num_labels": 8, **SIZES, **NO_DROPOUT}
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **options))


def unet() -> Theirs:
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


MODELS: dict[str, Callable[[], Theirs]] = {"gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit, "unet": unet}


def build(name: str) -> nn.Module:
    """Random values everywhere, biases and norms too, so that no mistake hides behind a zero or a one."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[name]().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.2)
    return model


def batch(name: str, samples: int) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    if name == "unet":
        images = torch.randn(2, samples, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"sample": images[0], "timestep": torch.arange(samples) * 100, "noise": images[1]}
    if name == "vit":
        images = torch.randn(samples, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": images, "labels": torch.arange(samples) % 8}
    tokens = torch.randint(1, VOCAB, (2, samples, LENGTH), generator=generator)
    return {"input_ids": tokens[0], "labels": tokens[1]}


def loss_of(model: nn.Module, inputs: Inputs) -> Tensor:
    """In double precision, where Hugging Face's own is in single."""
    if "noise" in inputs:
        noise = inputs["noise"]
        return nn.functional.mse_loss(model(inputs["sample"], inputs["timestep"]).sample, noise)
    output, labels = model(**inputs), inputs["labels"]
    return nn.functional.cross_entropy(output.logits.flatten(0, -2), labels.flatten())
