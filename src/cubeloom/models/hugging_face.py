"""Weights to and from Hugging Face's `transformers` and `diffusers`.

Their classes are GPT2LMHeadModel, LlamaForCausalLM and BertForMaskedLM, or BertForPreTraining if the configuration has
`next_sentence`; and UNet2DModel. Values are only moved, so a round trip is bit-exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from cubeloom.base.errors import UserError
from cubeloom.models._diffusers_config import config_from_diffusers as config_from_diffusers
from cubeloom.models._hugging_face_config import READINGS as READINGS
from cubeloom.models._hugging_face_config import config_from_hugging_face as config_from_hugging_face
from cubeloom.models._hugging_face_rules import Rule as Rule
from cubeloom.models._hugging_face_rules import Table, table
from cubeloom.models.configs import Config, LanguageConfig
from cubeloom.models.modules import build

State = dict[str, Tensor]
V = TypeVar("V")

SHOWN = 3  # names that a message gives per kind of error


def from_hugging_face(config: Config, state: Mapping[str, Tensor]) -> State:
    """Our state dict from theirs. Tensors with the same layout in both are shared, not copied."""
    rules = table(config)
    theirs = _originals(_recognised(state, rules), rules.their_copies)
    _check(theirs, _to(rules, _skeleton(config)), f"Hugging Face's tensors of {config}")
    ours = {rule.ours: rule.layout.join([theirs[name] for name in rule.theirs]) for rule in rules.rules}
    return _with_copies(ours, rules.our_copies)


def to_hugging_face(config: Config, state: Mapping[str, Tensor]) -> State:
    """The inverse. Tied weights have both names; safetensors' `save_model` stores them once."""
    rules = table(config)
    ours = _originals(state, rules.our_copies)
    _check(ours, _originals(_skeleton(config), rules.our_copies), f"the tensors of {config}")
    return _with_copies(_to(rules, ours), rules.their_copies)


def rules_to_read(config: LanguageConfig, stored: Mapping[str, Tensor]) -> tuple[list[Rule], list[tuple[str, str]]]:
    """How each of our tensors is formed, with the stored names of theirs; nothing is read.

    Only the shapes of `stored` matter, so meta tensors suffice. Also returns pairs of stored names that are one tied
    tensor and must have the same values.
    """
    from_hugging_face(config, {name: tensor.to("meta") for name, tensor in stored.items()})  # refuses what does not fit
    rules = table(config)
    names = _recognised({name: name for name in stored}, rules)
    copies = {copy: original for copy, original in rules.their_copies.items() if copy in names}
    pairs = [(names[copy], names[original]) for copy, original in copies.items() if original in names]
    names = {original: names[copy] for copy, original in copies.items()} | names
    return [_renamed(rule, [names[name] for name in rule.theirs]) for rule in rules.rules], pairs


def rules_to_write(config: LanguageConfig) -> list[Rule]:
    """How each of their tensors is formed, with the names under which transformers stores them: tied tensors once."""
    rules = table(config)
    # The only pair of names of which transformers stores the second.
    kept = {original: copy for copy, original in rules.their_copies.items() if copy == "cls.predictions.bias"}
    if config.tied:
        return [_renamed(rule, [kept.get(name, name) for name in rule.theirs]) for rule in rules.rules]
    untied = [_renamed(rule, [kept[name] for name in rule.theirs]) for rule in rules.rules if rule.theirs[0] in kept]
    return [*rules.rules, *untied]


def _renamed(rule: Rule, theirs: Sequence[str]) -> Rule:
    return Rule(rule.ours, tuple(theirs), rule.layout)


def _to(rules: Table, ours: Mapping[str, Tensor]) -> State:
    theirs: State = {}
    for rule in rules.rules:
        theirs.update(zip(rule.theirs, rule.layout.split(ours[rule.ours]), strict=True))
    return theirs


def _skeleton(config: Config) -> State:
    """Our state dict with shapes and without values."""
    with torch.device("meta"):
        return build(config).state_dict()


def _recognised(state: Mapping[str, V], rules: Table) -> dict[str, V]:
    learned = {_of_today(name): tensor for name, tensor in state.items() if not name.endswith(rules.unused)}
    if any(name.startswith(rules.prefix) for name in learned):
        return learned
    # Saved from the model without its head, as the first GPT-2s were published.
    return {rules.prefix + name: tensor for name, tensor in learned.items()}


def _of_today(name: str) -> str:
    """The first BERTs were published with other names for the parameters of a norm."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _originals(state: Mapping[str, Tensor], copies: Mapping[str, str]) -> State:
    """The state without second names, whose values must equal those of the first names."""
    originals = {name: tensor for name, tensor in state.items() if name not in copies}
    for copy, original in copies.items():
        if copy not in state:
            continue
        kept = originals.setdefault(original, state[copy])
        if kept is not state[copy] and not (kept.is_meta or torch.equal(kept, state[copy])):
            raise UserError(f"{copy} and {original} differ, but the configuration says they are tied; try tied=False")
    return originals


def _with_copies(state: State, copies: Mapping[str, str]) -> State:
    return state | {copy: state[original] for copy, original in copies.items()}


def _check(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    troubles = {
        "missing": [name for name in expected if name not in state],
        "unexpected": [name for name in state if name not in expected],
        "of another shape": [
            f"{name} {list(state[name].shape)} for {list(tensor.shape)}"
            for name, tensor in expected.items()
            if name in state and state[name].shape != tensor.shape
        ],
    }
    if any(troubles.values()):
        found = "; ".join(f"{kind}: {_first_few(names)}" for kind, names in troubles.items() if names)
        raise UserError(f"these are not {what}: {found}")


def _first_few(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more
