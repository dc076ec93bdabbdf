"""Small folders as transformers saves them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Theirs = Any  # transformers has no types

VOCAB, POSITIONS, LAYERS = 64, 8, 2


def gpt2(**options: Any) -> Theirs:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "n_positions": POSITIONS,
        "n_embd": 32,
        "n_layer": LAYERS,
        "n_head": 4,
    }
    none: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **none, bos_token_id=3, eos_token_id=5, **options)
    )


def llama(kv_heads: int = 4, **options: Any) -> Theirs:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "max_position_embeddings": POSITIONS,
        "hidden_size": 32,
        "intermediate_size": 40,
    }
    heads: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": kv_heads}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, **options))


def bert_config(**options: Any) -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "max_position_embeddings": POSITIONS,
        "hidden_size": 32,
        "intermediate_size": 128,
    }
    heads: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "hidden_dropout_prob": 0.0}
    return transformers.BertConfig(**sizes, **heads, pad_token_id=None, **options)


def bert(**options: Any) -> Theirs:
    return transformers.BertForMaskedLM(bert_config(**options))


def bert_for_pretraining(**options: Any) -> Theirs:
    return transformers.BertForPreTraining(bert_config(**options))


MODELS: dict[str, Callable[[], Theirs]] = {
    "gpt2": gpt2,
    "gpt2 untied": lambda: gpt2(tie_word_embeddings=False),
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "llama far base": lambda: llama(rope_parameters={"rope_theta": 500000.0, "rope_type": "default"}),
    "bert": bert,
    "bert untied": lambda: bert(tie_word_embeddings=False),
    "bert with next sentence": bert_for_pretraining,
}


def prepare(theirs: Theirs, dtype: torch.dtype = torch.float32) -> Theirs:
    """Random values everywhere, so that no mistake hides behind a zero or a one."""
    torch.manual_seed(1)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, mean=0.1, std=0.2)
    if theirs.config.model_type == "bert" and not theirs.config.tie_word_embeddings:
        # Theirs has a second bias then that nothing reads; ours has it not, and writes the first in its place.
        theirs.cls.predictions.bias.data.copy_(theirs.cls.predictions.decoder.bias.data)
    theirs.set_attn_implementation("sdpa")
    return theirs.eval().to(dtype)


def saved(folder: Path, theirs: Theirs, **options: Any) -> Path:
    theirs.save_pretrained(folder, **options)
    return folder


def loaded(folder: Path, like: Theirs) -> Theirs:
    found, said = type(like).from_pretrained(folder, output_loading_info=True, attn_implementation="sdpa")
    assert not any(said.values()), said
    return found.eval()


def logits(theirs: Theirs) -> Tensor:
    output = theirs(tokens())
    found: Tensor = output.prediction_logits if "prediction_logits" in output else output.logits
    return found


def tokens() -> Tensor:
    return torch.arange(4 * POSITIONS).view(4, POSITIONS) * 7 % VOCAB


def change_config(folder: Path, **changes: Any) -> None:
    """A change to None takes the entry out."""
    file = folder / "config.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its path."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
