"""Converts the config.json of a Hugging Face folder to our configuration and back."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.models import BERTConfig, GPTConfig, LanguageConfig, LlamaConfig, config_from_hugging_face
from cubeloom.models.hugging_face import READINGS

NEXT_SENTENCE = "cls.seq_relationship.weight"
"""A folder with this tensor predicts next sentences, whatever class config.json names: the first BERTs name another."""


def read_config(theirs: Mapping[str, Any], names: Collection[str]) -> LanguageConfig:
    """Our configuration of a folder with tensors of these names."""
    kind = theirs.get("model_type")
    if not isinstance(kind, str) or kind not in READINGS:
        nearest = difflib.get_close_matches(str(kind), READINGS, n=1, cutoff=0.0)[0]
        raise UserError(
            f"no model here is Hugging Face's {kind!r}; those that are: {', '.join(READINGS)}, of which {nearest} is nearest"
        )
    config = config_from_hugging_face({**_left_out(theirs), **theirs})
    if isinstance(config, BERTConfig):
        return replace(config, next_sentence=NEXT_SENTENCE in names)
    return config


def _left_out(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that older versions of transformers did not write."""
    if theirs["model_type"] == "llama":
        return {"tie_word_embeddings": False, "num_key_value_heads": theirs.get("num_attention_heads")}
    return {"tie_word_embeddings": True}


def write_config(config: LanguageConfig, dtype: str, original: Mapping[str, Any]) -> dict[str, Any]:
    """Their configuration. Entries unknown to ours, such as special tokens, are kept from an `original` of the same
    model.
    """
    fields = {their: getattr(config, our) for our, their in READINGS[_kind(config)].fields.items()}
    made = {**original, **fields} if _same_model(original, config) else {**_options(config), **fields}
    made.pop("torch_dtype", None)  # its name before transformers 5
    return made | {"dtype": dtype}


def _options(config: LanguageConfig) -> dict[str, Any]:
    """The entries of config.json for our models, besides fields that ours has too."""
    kind = _kind(config)
    legal = {option: values[0] for option, values in READINGS[kind].legal.items()}
    return {"model_type": kind, "architectures": [_class_of(config)], **legal, **_derived(config)}


def _kind(config: LanguageConfig) -> str:
    return next(kind for kind, reading in READINGS.items() if isinstance(config, reading.make))


def _derived(config: LanguageConfig) -> dict[str, Any]:
    match config:
        case GPTConfig():
            return {"n_inner": None, "embd_pdrop": config.dropout, "attn_pdrop": 0.0}
        case BERTConfig():
            return {"intermediate_size": 4 * config.hidden, "attention_probs_dropout_prob": 0.0, "pad_token_id": None}
        case LlamaConfig():
            # transformers 5 reads the first, earlier versions the second.
            rotary = {"rope_theta": config.rotary_base, "rope_type": "default"}
            return {"head_dim": config.head_dim, "rope_parameters": rotary, "rope_theta": config.rotary_base}


def _class_of(config: LanguageConfig) -> str:
    match config:
        case GPTConfig():
            return "GPT2LMHeadModel"
        case LlamaConfig():
            return "LlamaForCausalLM"
        case BERTConfig():
            return "BertForPreTraining" if config.next_sentence else "BertForMaskedLM"


def _same_model(original: Mapping[str, Any], config: LanguageConfig) -> bool:
    if not original:
        return False
    names = [NEXT_SENTENCE] if isinstance(config, BERTConfig) and config.next_sentence else []
    return read_config(original, names) == replace(config, label_smoothing=0.0)
