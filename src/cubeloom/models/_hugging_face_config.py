"""Converts Hugging Face configurations to ours: fields with a counterpart, and options with only one supported value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from cubeloom.base.errors import UserError
from cubeloom.base.limits import of_model, share, within
from cubeloom.base.settings.convert import typed
from cubeloom.models.configs import BERTConfig, GPTConfig, LanguageConfig, LlamaConfig


@dataclass(frozen=True)
class Reading:
    """How one kind of configuration is read.

    `fields`: their names of our fields. `legal`: their options, with the values under which our model computes the
    same; a missing option has the first.
    """

    make: type[LanguageConfig]
    fields: dict[str, str]
    legal: dict[str, tuple[object, ...]]


READINGS = {
    "gpt2": Reading(
        GPTConfig,
        {
            "vocab": "vocab_size",
            "positions": "n_positions",
            "hidden": "n_embd",
            "layers": "n_layer",
            "heads": "n_head",
            "tied": "tie_word_embeddings",
            "dropout": "resid_pdrop",
            "norm_eps": "layer_norm_epsilon",
        },
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
    ),
    "llama": Reading(
        LlamaConfig,
        {
            "vocab": "vocab_size",
            "positions": "max_position_embeddings",
            "hidden": "hidden_size",
            "layers": "num_hidden_layers",
            "heads": "num_attention_heads",
            "kv_heads": "num_key_value_heads",
            "mlp_hidden": "intermediate_size",
            "norm_eps": "rms_norm_eps",
            "tied": "tie_word_embeddings",
        },
        {
            "hidden_act": ("silu", "swish"),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "attention_dropout": (0.0,),
        },
    ),
    "bert": Reading(
        BERTConfig,
        {
            "vocab": "vocab_size",
            "positions": "max_position_embeddings",
            "hidden": "hidden_size",
            "layers": "num_hidden_layers",
            "heads": "num_attention_heads",
            "types": "type_vocab_size",
            "dropout": "hidden_dropout_prob",
            "norm_eps": "layer_norm_eps",
            "tied": "tie_word_embeddings",
        },
        {
            "hidden_act": ("gelu",),
            "position_embedding_type": ("absolute",),
            "is_decoder": (False,),
            "add_cross_attention": (False,),
        },
    ),
}


def config_from_hugging_face(theirs: Mapping[str, Any]) -> LanguageConfig:
    """Our configuration from `config.to_dict()` of theirs. Options that our model does not have are refused.

    One is ignored: the dropout of attention probabilities in GPT-2 and BERT, which only affects training.
    `next_sentence` depends on the model's class and is False: `dataclasses.replace` it for BertForPreTraining.
    """
    kind = theirs.get("model_type")
    if not isinstance(kind, str) or kind not in READINGS:
        raise UserError(f"no model here is Hugging Face's {kind!r}; those that are: {', '.join(READINGS)}")
    reading = READINGS[kind]
    refuse_missing(kind, theirs, reading.fields.values())
    ours = _numbers(reading, theirs)
    refuse_options(kind, theirs, reading.legal | _derived(kind, ours))
    if kind == "llama":
        ours["rotary_base"] = _rotary_base(theirs)
    return reading.make(**ours)


def _numbers(reading: Reading, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """What our configuration takes from theirs. Text instead of a number is refused, with their name of the field."""
    hints = get_type_hints(reading.make)
    ours = {our: typed(hints[our], theirs[their], their) for our, their in reading.fields.items()}
    for our, their in reading.fields.items():
        if hints[our] is int:
            within(their, ours[our], most=of_model(our))
        elif our == "dropout":
            share(their, ours[our])
    return ours


def refuse_missing(kind: str, theirs: Mapping[str, Any], names: Iterable[str]) -> None:
    missing = [name for name in names if name not in theirs]
    if missing:
        raise UserError(f"this configuration of a {kind} has no {', '.join(missing)}")


def refuse_options(kind: str, theirs: Mapping[str, Any], legal: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse a value under which our model would compute something else."""
    for option, values in legal.items():
        if theirs.get(option, values[0]) not in values:
            raise UserError(
                f"{kind} with {option}={theirs[option]!r} is not supported; it must be {' or '.join(map(repr, values))}"
            )


def _derived(kind: str, ours: Mapping[str, Any]) -> dict[str, tuple[object, ...]]:
    """Options whose only supported value follows from others."""
    match kind:
        case "gpt2":
            return {"n_inner": (None, 4 * ours["hidden"]), "embd_pdrop": (ours["dropout"],)}
        case "bert":
            return {"intermediate_size": (4 * ours["hidden"],)}
        case _:
            return {"head_dim": (None, ours["hidden"] // ours["heads"])}


def _rotary_base(theirs: Mapping[str, Any]) -> float:
    """From `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of earlier versions."""
    parts = {name: theirs.get(name) or {} for name in ("rope_parameters", "rope_scaling")}
    for name, part in parts.items():
        if not isinstance(part, Mapping):
            raise UserError(f"llama with {name}={part!r} is not supported; it must be a section, with rope_type")
    rotary = parts["rope_parameters"] or {**parts["rope_scaling"], "rope_theta": theirs.get("rope_theta")}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind != "default" or rotary.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"llama with rotary positions {dict(rotary)} is not supported; rope_type must be 'default'")
    return float(typed(float, rotary.get("rope_theta") or LlamaConfig.rotary_base, "rope_theta"))
