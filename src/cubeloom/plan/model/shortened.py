"""A model without most of its equal blocks: what is found for one holds for all of them."""

from __future__ import annotations

import re
from collections import defaultdict
from copy import deepcopy
from dataclasses import dataclass

from torch import nn

_ENOUGH = 2  # of each kind, because the first may get other inputs than the following ones
_PLAIN = (int, float, str, bool, type(None))
_NUMBER = re.compile(r"(idx|index|number|layer_id)$")


@dataclass(frozen=True)
class Shortened:
    model: nn.Module
    blocks: dict[str, str]
    """For each block of the whole model, in order, the block of the shortened model that represents it."""


def shortened(model: nn.Module) -> Shortened:
    """Of equal blocks in a `ModuleList` only the first few."""
    made, blocks = deepcopy(model), dict[str, str]()
    for name, row in list(made.named_modules()):
        if not isinstance(row, nn.ModuleList) or any(name.startswith(f"{other}.") for other in _rows(blocks)):
            continue
        kept: dict[object, list[int]] = defaultdict(list)
        order: list[int] = []
        for number, block in enumerate(row):
            places = kept[_kind(block)]
            if len(places) < _ENOUGH:
                places.append(len(order))
                order.append(number)
            blocks[f"{name}.{number}"] = f"{name}.{places[-1]}"
        if len(order) < len(row):
            owner, _, attribute = name.rpartition(".")
            setattr(made.get_submodule(owner), attribute, nn.ModuleList([row[number] for number in order]))
    return Shortened(made, blocks)


def _rows(blocks: dict[str, str]) -> set[str]:
    return {name.rpartition(".")[0] for name in blocks}


def _kind(block: nn.Module) -> object:
    """Everything that its forward can depend on, except its index and values."""
    return tuple(
        (
            name,
            type(each),
            tuple((own, tuple(parameter.shape)) for own, parameter in each.named_parameters(recurse=False)),
            tuple(sorted((own, repr(value)) for own, value in vars(each).items() if _is_said(own, value))),
        )
        for name, each in block.named_modules()
    )


def _is_said(name: str, value: object) -> bool:
    return isinstance(value, _PLAIN) and not _NUMBER.search(name)
