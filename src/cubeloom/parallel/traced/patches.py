"""Numbers in modules that depend on the whole features, such as the number of heads: on a rank they must match its
part.

Code like `x.view(batch, sequence, self.num_heads, -1)` reads them from an attribute of the module, or of its
configuration. Which of them to change is found by trial: what is accepted computes what the serial model does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from cubeloom.parallel.cut import pattern_of

_COUNTS_HEADS = re.compile(r"head")
_COUNTS_NONE = re.compile(r"dim|size|mask|type|layer|group|per_|router|scale|index")
_COUNTS_GROUPS = re.compile(r"groups$|n_rep|repeats?$")
# What may be changed: numbers of heads only; widths too; or the number of queries per key.
HEADS, WIDTHS, GROUPS = 1, 2, 3


@dataclass(frozen=True)
class Patch:
    """The values on a rank of these attributes of a module, and of its configuration.

    Blocks of different kinds can have the same name: one without such an attribute stays as it is.
    """

    own: Mapping[str, int]
    config: Mapping[str, int]

    @classmethod
    def joined(cls, patches: Iterable[Patch]) -> Patch:
        found = cls({}, {})
        for each in patches:
            found = cls({**found.own, **each.own}, {**found.config, **each.config})
        return found

    def apply(self, module: nn.Module) -> None:
        for name, value in self.own.items():
            if hasattr(module, name):
                setattr(module, name, value)
        if self.config and hasattr(module, "config"):
            config = copy(module.config)
            for name, value in self.config.items():
                setattr(config, name, value)
            module.config = config


def patch_of(module: nn.Module, stage: int, parts: int, already: Patch) -> Patch | None:
    """What to try at a stage, in addition to what was changed already; None if there is nothing to change."""
    widths = {size for each in module.modules() for size in _sizes(each)} if stage == WIDTHS else set()

    def wanted(name: str, value: Any) -> bool:
        if not isinstance(value, int) or isinstance(value, bool) or value < 2 or value % parts:
            return False
        if stage == GROUPS:
            return bool(_COUNTS_GROUPS.search(name))
        return _is_count(name) or value in widths

    held = {name: value for kind in reversed(type(module).__mro__) for name, value in vars(kind).items()} | vars(module)
    own = {name: value for name, value in held.items() if not name.startswith("_") and wanted(name, value)}
    config = vars(module).get("config")
    theirs = (
        {}
        if config is None
        else {name: each for name, each in vars(config).items() if _is_count(name) and wanted(name, each)}
    )
    own, theirs = _without(own, already.own), _without(theirs, already.config)
    if not own and not theirs:
        return None
    return Patch(*({name: value // parts for name, value in some.items()} for some in (own, theirs)))


def _without(some: Mapping[str, int], others: Mapping[str, int]) -> dict[str, int]:
    return {name: value for name, value in some.items() if name not in others}


def _is_count(name: str) -> bool:
    return bool(_COUNTS_HEADS.search(name)) and not _COUNTS_NONE.search(name)


def _sizes(module: nn.Module) -> Iterator[int]:
    weight = getattr(module, "weight", None)
    if weight is not None and weight.dim() == 2:
        yield from weight.shape


@contextmanager
def patched(model: nn.Module, patches: Mapping[str, Patch]) -> Iterator[None]:
    """Apply patches, by name pattern, within this context."""
    before = []
    for name, module in model.named_modules():
        patch = patches.get(pattern_of(name))
        if patch is not None:
            before.append((vars(module), dict(vars(module))))
            patch.apply(module)
    try:
        yield
    finally:
        for attributes, old in before:
            attributes.clear()
            attributes.update(old)
