"""The optimizers and the sources of data that a settings file can name. Those of a user are `file.py:function`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cubeloom.base.registry import Lazy, Registry

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from cubeloom.train.data import Samples

_OPTIMIZERS, _DATA = "cubeloom.train.optimizers", "cubeloom.train.job.samples"

OPTIMIZERS: Registry[Callable[[list[dict[str, Any]], Any], Optimizer]] = Registry(
    "optimizer", {name: Lazy(f"{_OPTIMIZERS}:{name}") for name in ("adamw", "sgd")}, functions=True
)
"""From groups of parameters and the settings of `[optimizer]` to the optimizer."""

DATA: Registry[Callable[..., Samples]] = Registry(
    "source of data",
    {
        "tokens": Lazy(f"{_DATA}:tokens"),
        "masked-tokens": Lazy(f"{_DATA}:masked_tokens"),
        "images": Lazy(f"{_DATA}:images"),
        "noised-images": Lazy(f"{_DATA}:images"),
        "random": Lazy(f"{_DATA}:random"),
    },
    functions=True,
)
"""From the job and "training" or "validation" to samples by number."""
