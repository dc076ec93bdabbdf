"""Small Hugging Face models with random weights, beside ours with the same."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from cubeloom.models import LanguageConfig, LanguageModel, build, config_from_hugging_face, from_hugging_face

Theirs = Any  # transformers has no types

VOCAB, POSITIONS, LAYERS = 61, 12, 3


def gpt2(**options: Any) -> Theirs:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_positions=POSITIONS,
            n_embd=24,
            n_layer=LAYERS,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            **options,
        )
    )


def llama(**options: Any) -> Theirs:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            max_position_embeddings=POSITIONS,
            hidden_size=48,
            intermediate_size=40,
            num_hidden_layers=LAYERS,
            num_attention_heads=6,
            num_key_value_heads=2,
            **options,
        )
    )


def bert_config(**options: Any) -> Any:
    return transformers.BertConfig(
        vocab_size=VOCAB,
        max_position_embeddings=POSITIONS,
        hidden_size=24,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        # Hugging Face gives the padding token's row no gradient where it is looked up; we have no padding.
        pad_token_id=None,
        **options,
    )


def bert(**options: Any) -> Theirs:
    return transformers.BertForMaskedLM(bert_config(**options))


def bert_for_pretraining(**options: Any) -> Theirs:
    return transformers.BertForPreTraining(bert_config(**options))


def prepare(theirs: Theirs, *, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Theirs:
    """Random values everywhere, biases and norms too, so that no mistake hides behind a zero or a one."""
    torch.manual_seed(1)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.2)
    theirs.set_attn_implementation(attention)
    return theirs.eval().to(dtype)


def config_of(theirs: Theirs, **changes: Any) -> LanguageConfig:
    return config_from_hugging_face({**theirs.config.to_dict(), **changes})


def ours_of(theirs: Theirs, config: LanguageConfig | None = None) -> LanguageModel:
    """Our model with their weights."""
    config = config or config_of(theirs)
    model = build(config).to(next(theirs.parameters()).dtype)
    model.load_state_dict(from_hugging_face(config, theirs.state_dict()))
    return model.eval()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and targets `[3, 12]`, with some targets ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (3, POSITIONS), generator=generator)
    targets = torch.randint(VOCAB, (3, POSITIONS), generator=generator)
    return tokens, targets.masked_fill(torch.rand(targets.shape, generator=generator) < 0.3, -100)
