"""Weights and configurations convert both ways, and others are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from cubeloom import UserError
from cubeloom.models import (
    PRESETS,
    BERTConfig,
    Config,
    GPTConfig,
    LanguageConfig,
    LlamaConfig,
    build,
    config_from_hugging_face,
    from_hugging_face,
    to_hugging_face,
)

from . import hugging

TINY = [config for name, config in PRESETS.items() if name.endswith("-tiny")]
CONFIGS: list[Config] = [
    *(replace(config, tied=tied) for config in TINY if isinstance(config, LanguageConfig) for tied in (True, False)),
    PRESETS["unet-tiny"],
    BERTConfig(vocab=10, positions=4, hidden=8, layers=1, heads=2, next_sentence=True),
]
THEIRS = [hugging.gpt2, hugging.llama, hugging.bert]


def random_state(config: Config) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = build(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model.state_dict()


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_ours_to_theirs_and_back_is_exact(config: Config) -> None:
    state = random_state(config)
    theirs = to_hugging_face(config, state)
    assert all(tensor.is_contiguous() for tensor in theirs.values())
    assert same(from_hugging_face(config, theirs), state)


@pytest.mark.parametrize("make", THEIRS)
@pytest.mark.parametrize("tied", [True, False])
def test_theirs_to_ours_and_back_is_exact(make: Callable[..., hugging.Theirs], tied: bool) -> None:
    theirs = hugging.prepare(make(tie_word_embeddings=tied))
    config = hugging.config_of(theirs)
    state = theirs.state_dict()
    back = to_hugging_face(config, from_hugging_face(config, state))
    if not tied and isinstance(config, BERTConfig):
        # Theirs then holds a second bias that nothing reads.
        state["cls.predictions.bias"] = state["cls.predictions.decoder.bias"]
    assert same(back, state)
    theirs.load_state_dict(back)


@pytest.mark.parametrize(
    ("make", "copies"),
    [
        (hugging.gpt2, ["lm_head.weight", "transformer.wte.weight"]),
        (lambda: hugging.llama(tie_word_embeddings=True), ["lm_head.weight", "model.embed_tokens.weight"]),
        (hugging.bert, ["cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"]),
        (hugging.bert, ["cls.predictions.bias", "cls.predictions.decoder.bias"]),
    ],
)
def test_a_tied_tensor_may_come_under_either_name(make: Callable[[], hugging.Theirs], copies: list[str]) -> None:
    theirs = hugging.prepare(make())
    config, state = hugging.config_of(theirs), theirs.state_dict()
    whole = from_hugging_face(config, state)
    for name in copies:
        assert same(from_hugging_face(config, {key: value for key, value in state.items() if key != name}), whole)
    with pytest.raises(UserError, match="differ, but the configuration says they are tied"):
        from_hugging_face(config, {**state, copies[0]: state[copies[0]] + 1})


def test_a_tied_tensor_of_ours_may_come_once() -> None:
    config = PRESETS["gpt-tiny"]
    state = random_state(config)
    whole = to_hugging_face(config, state)
    del state["head.weight"]
    assert same(to_hugging_face(config, state), whole)


def test_gpt2_as_first_published() -> None:
    """Without the prefix, without the head, and with the causal masks."""
    theirs = hugging.prepare(hugging.gpt2())
    config, state = hugging.config_of(theirs), theirs.state_dict()
    published = {name.removeprefix("transformer."): value for name, value in state.items() if name != "lm_head.weight"}
    published["h.0.attn.bias"] = torch.ones(1, 1, 12, 12)
    assert same(from_hugging_face(config, published), from_hugging_face(config, state))


def test_a_state_of_another_model_is_refused() -> None:
    llama = PRESETS["llama-tiny"]
    state = to_hugging_face(llama, random_state(llama))
    with pytest.raises(UserError) as refusal:
        from_hugging_face(PRESETS["gpt-tiny"], state)
    assert "missing: transformer.wte.weight, transformer.wpe.weight, " in str(refusal.value)
    assert "unexpected: " in str(refusal.value)
    assert "more" in str(refusal.value)


def test_a_state_of_another_size_is_refused_with_both_shapes() -> None:
    gpt = PRESETS["gpt-tiny"]
    assert isinstance(gpt, GPTConfig)
    state = to_hugging_face(gpt, random_state(gpt))
    with pytest.raises(UserError, match=r"of another shape: transformer.wte.weight \[384, 96\] for \[400, 96\]$"):
        from_hugging_face(replace(gpt, vocab=400), state)
    with pytest.raises(UserError, match=r"unexpected: transformer.h.1.ln_1.weight, .* and 9 more$"):
        from_hugging_face(replace(gpt, layers=1), state)
    with pytest.raises(UserError, match=r"missing: blocks.2.norm1.weight, .* and 9 more$"):
        to_hugging_face(replace(gpt, layers=3), random_state(gpt))


@pytest.mark.parametrize(
    ("preset", "theirs"),
    [
        ("gpt2", transformers.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0)),
        ("bert-base", transformers.BertConfig(hidden_dropout_prob=0.0)),
        (
            "llama-7b",
            transformers.LlamaConfig(max_position_embeddings=4096, rms_norm_eps=1e-5),
        ),
        (
            "llama3-8b",
            transformers.LlamaConfig(
                vocab_size=128256,
                max_position_embeddings=8192,
                num_key_value_heads=8,
                intermediate_size=14336,
                rms_norm_eps=1e-5,
                rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
            ),
        ),
    ],
)
def test_configurations_are_the_presets(preset: str, theirs: Any) -> None:
    assert config_from_hugging_face(theirs.to_dict()) == PRESETS[preset]


def test_norms_default_to_theirs() -> None:
    assert GPTConfig.norm_eps == transformers.GPT2Config().layer_norm_epsilon
    assert LlamaConfig.norm_eps == transformers.LlamaConfig().rms_norm_eps
    assert BERTConfig.norm_eps == transformers.BertConfig().layer_norm_eps


def test_a_llama_configuration_of_transformers_4() -> None:
    fields = transformers.LlamaConfig().to_dict()
    del fields["rope_parameters"]
    old = config_from_hugging_face({**fields, "rope_theta": 500000.0, "rope_scaling": None})
    assert isinstance(old, LlamaConfig)
    assert old.rotary_base == 500000.0
    assert replace(old, rotary_base=10000.0) == config_from_hugging_face(transformers.LlamaConfig().to_dict())
    with pytest.raises(UserError, match="rope_type must be 'default'"):
        config_from_hugging_face({**fields, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}})


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [
        (hugging.gpt2, "activation_function", "relu"),
        (hugging.gpt2, "n_inner", 100),
        (hugging.gpt2, "embd_pdrop", 0.3),
        (hugging.gpt2, "scale_attn_by_inverse_layer_idx", True),
        (hugging.llama, "attention_bias", True),
        (hugging.llama, "head_dim", 16),
        (hugging.llama, "hidden_act", "gelu"),
        (hugging.bert, "intermediate_size", 100),
        (hugging.bert, "is_decoder", True),
    ],
)
def test_an_option_we_do_not_have_is_refused_by_name(
    make: Callable[[], hugging.Theirs], option: str, value: object
) -> None:
    with pytest.raises(UserError, match=f"{option}={value!r} is not supported; it must be "):
        hugging.config_of(make(), **{option: value})


def test_other_configurations_are_refused() -> None:
    with pytest.raises(UserError, match="no model here is Hugging Face's 'mamba'; those that are: gpt2, llama, bert"):
        config_from_hugging_face({"model_type": "mamba"})
    with pytest.raises(UserError, match="has no vocab_size, n_positions"):
        config_from_hugging_face({"model_type": "gpt2"})
