"""Presets have the sizes they are known by, and every model its contract of names and initial values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cubeloom import UserError
from cubeloom.base.initial import Constant, Normal
from cubeloom.models import BERT, GPT, PRESETS, BERTConfig, GPTConfig, Llama, LlamaConfig, Model, build, config, names

EXACT = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt2-64": 1_389_327_360,  # Chimera, table 4
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "bert-48": 669_790_012,  # Chimera, table 4
    "llama-7b": 6_738_415_616,
    "llama-13b": 13_015_864_320,
    "llama-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "unet-cifar10": 35_746_307,  # DDPM's paper says 35.7 million; diffusers' model has just as many
    "resnet-18": 11_689_512,
    "resnet-34": 21_797_672,
}
BILLIONS = {f"gpt-{size}b": size for size in (5, 10, 20, 40, 50, 60, 80, 100, 160, 175)}
TENSOR3D = {f"unet-{size}b": size for size in (3.5, 7.5, 14, 28)}
MODULES = {
    "gpt-tiny": {
        "": "embed positions dropout blocks norm head loss",
        "blocks.1": "norm1 attention norm2 mlp",
        "blocks.1.attention": "qkv core proj dropout",
        "blocks.1.mlp": "up act down dropout",
    },
    "llama-tiny": {
        "": "embed blocks norm head loss",
        "blocks.1": "norm1 attention norm2 mlp",
        "blocks.1.attention": "qkv core proj",
        "blocks.1.mlp": "gate_up act down",
    },
    "bert-tiny": {
        "": "embed positions types embed_norm dropout blocks transform act transform_norm decoder loss",
        "blocks.1": "attention norm1 mlp norm2",
        "blocks.1.attention": "qkv core proj dropout",
        "blocks.1.mlp": "up act down dropout",
    },
    "unet-tiny": {
        "": "time conv_in down middle up norm_out act conv_out loss",
        "time": "first act second act_out",
        "down": "0 1 2 3 4",
        "down.0": "res",
        "down.0.res": "norm1 act conv1 time_proj norm2 dropout conv2",
        "down.1": "conv",
        "down.2": "res attention",
        "down.2.res": "norm1 act conv1 time_proj norm2 dropout conv2 skip",
        "down.2.attention": "norm qkv core proj",
        "middle": "0 1",
        "middle.0": "res attention",
        "middle.1": "res",
        "up": "0 1 2 3 4 5 6 7",
        "up.0": "concat res",
        "up.2": "conv",
        "up.3": "concat res attention",
    },
    "resnet-tiny": {
        "": "conv_in norm_in act pool_in blocks pool head loss",
        "blocks.0": "conv1 bn1 act conv2 bn2",
        "blocks.1": "conv1 bn1 act conv2 bn2 skip skip_norm",
    },
}
TINY = ["gpt-tiny", "llama-tiny", "bert-tiny"]  # models of language: what the others do is in their own tests


def on_meta(name: str) -> Model:
    with torch.device("meta"):
        return build(name)


def parameters(name: str) -> int:
    return sum(parameter.numel() for parameter in on_meta(name).parameters())


@pytest.mark.parametrize(("name", "count"), EXACT.items())
def test_parameters_are_as_published(name: str, count: int) -> None:
    assert parameters(name) == count


@pytest.mark.parametrize(("name", "billions"), BILLIONS.items())
def test_the_papers_sizes_are_near_their_names(name: str, billions: int) -> None:
    assert parameters(name) == pytest.approx(billions * 1e9, rel=0.05)


@pytest.mark.parametrize(("name", "billions"), TENSOR3D.items())
def test_unets_have_the_paper_s_sizes(name: str, billions: float) -> None:
    assert parameters(name) == pytest.approx(billions * 1e9, rel=0.03)


@pytest.mark.parametrize(
    ("name", "billions"), {"unet-550m": 0.55, "unet-1b": 1, "unet-2b": 2, "unet-4b": 4, "unet-8b": 8}.items()
)
def test_unets_of_the_authors_scripts_are_near_their_names(name: str, billions: float) -> None:
    # Theirs have somewhat more: two numbers a channel from the time, where DDPM's have one.
    assert parameters(name) == pytest.approx(billions * 1e9, rel=0.07)


def test_a_wide_resnet_has_the_parameters_of_its_paper() -> None:
    assert parameters("wideresnet-34-2") == pytest.approx(86.0e6, rel=1e-3)


def test_every_preset_is_built_on_the_meta_device() -> None:
    for name in names():
        assert all(parameter.is_meta for parameter in on_meta(name).parameters())


@pytest.mark.parametrize("name", MODULES)
def test_modules_have_the_names_that_cuts_rely_on(name: str) -> None:
    model = build(name)
    for path, children in MODULES[name].items():
        assert [child for child, _ in model.get_submodule(path).named_children()] == children.split()


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_forward_gives_logits_or_a_loss(name: str, device: str) -> None:
    with torch.device(device):
        model = build(name)
        tokens = torch.zeros(2, 6, dtype=torch.int64)
        assert model(tokens).shape == (12, 384)
        loss = model(tokens, tokens)
        loss.backward()
    assert loss.shape == ()
    assert loss.device.type == device
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_tied_head_is_the_embedding() -> None:
    gpt, bert, llama = build("gpt-tiny"), build("bert-tiny"), build("llama-tiny")
    assert isinstance(gpt, GPT) and isinstance(bert, BERT) and isinstance(llama, Llama)
    assert gpt.head.weight is gpt.embed.weight
    assert bert.decoder.weight is bert.embed.weight
    assert llama.head.weight is not llama.embed.weight


def test_initial_values_of_gpt() -> None:
    model = build("gpt-tiny")
    expected = {
        "embed.weight": Normal(0.02),
        "head.weight": Normal(0.02),
        "positions.weight": Normal(0.02),
        "norm.weight": Constant(1.0),
        "norm.bias": Constant(0.0),
        "blocks.0.norm1.weight": Constant(1.0),
        "blocks.0.attention.qkv.weight": Normal(0.02),
        "blocks.0.attention.qkv.bias": Constant(0.0),
        "blocks.1.attention.proj.weight": Normal(0.01),  # 0.02 / sqrt(2 * 2 layers)
        "blocks.1.mlp.up.weight": Normal(0.02),
        "blocks.1.mlp.down.weight": Normal(0.01),
        "blocks.1.mlp.down.bias": Constant(0.0),
    }
    assert {name: model.initial(name) for name in expected} == expected


@pytest.mark.parametrize("name", ["llama-tiny", "bert-tiny", "bert-48"])
def test_initial_values_of_the_others(name: str) -> None:
    model = on_meta(name)
    for parameter, tensor in model.named_parameters():
        one_dim = Constant(0.0 if parameter.endswith("bias") else 1.0)
        assert model.initial(parameter) == (one_dim if tensor.dim() == 1 else Normal(0.02))


def test_dropout_of_the_configuration_reaches_every_layer() -> None:
    sizes: dict[str, Any] = {"vocab": 8, "positions": 4, "hidden": 8, "layers": 2, "heads": 2, "dropout": 0.25}
    for model in (build(GPTConfig(**sizes)), build(BERTConfig(**sizes))):
        rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
        assert rates == [0.25] * 5


def test_an_unknown_name_is_refused_with_the_nearest_and_all() -> None:
    with pytest.raises(UserError, match=r"unknown model 'gpt-tinny'; did you mean 'gpt-tiny'\? There are gpt-tiny, ll"):
        config("gpt-tinny")
    with pytest.raises(UserError, match="There are gpt-tiny"):
        build("???")
    assert config("gpt2") is PRESETS["gpt2"]


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="7 heads do not divide the hidden size 96; the nearest that do: 6 or 8"):
        GPTConfig(vocab=8, positions=4, hidden=96, layers=1, heads=7)
    with pytest.raises(UserError, match="5 key-value heads do not divide the number of heads 12"):
        LlamaConfig(vocab=8, positions=4, hidden=96, layers=1, heads=12, kv_heads=5, mlp_hidden=8)
    with pytest.raises(UserError, match="in pairs, but a head has 3"):
        LlamaConfig(vocab=8, positions=4, hidden=6, layers=1, heads=2, kv_heads=1, mlp_hidden=8)


@pytest.mark.parametrize("name", TINY)
def test_a_sequence_that_is_too_long_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="65 tokens is too long: the model has 64 positions"):
        build(name)(torch.zeros(1, 65, dtype=torch.int64))


def test_a_bert_without_the_next_sentence_refuses_its_labels() -> None:
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    bert = build("bert-tiny")
    assert isinstance(bert, BERT)
    with pytest.raises(UserError, match="next_sentence=True"):
        bert(tokens, tokens, next_sentence=torch.tensor([0, 1]))
