"""What is measured of one step of training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Record:
    step: int
    """From 0, as the learning rate counts them."""
    loss: float
    gradient_norm: float | None
    """None where a schedule updates weights within a step: there is no gradient of the whole step."""
    learning_rate: float
    seconds: float
    tokens_per_s: float
    """Of the whole grid."""
    mfu: float | None = None
    """None where the device's peak is not known."""
    memory_bytes: int | None = None
    """The peak, of the rank that has the highest."""
    computing_s: float | None = None
    exposed_s: float | None = None
    """Communication that no computation hid."""
    bubble_s: float | None = None
    skipped: str | None = None
    """Why the update was skipped, if it was."""
    validation: float | None = None
    """The loss on validation data, where it was evaluated after this step."""

    own: Mapping[str, float] = field(default_factory=dict)
    """Metrics of callbacks, by the names that they gave them."""

    @property
    def remarkable(self) -> bool:
        """Kept and shown, however many steps are not."""
        return self.skipped is not None or self.validation is not None

    def as_json(self) -> dict[str, Any]:
        """Every field, always. JSON has no NaN and no infinity: such a number is null."""
        found = {each.name: finite(getattr(self, each.name)) for each in fields(self)}
        return found | {"own": {name: finite(value) for name, value in self.own.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Record:
        """The inverse, but that an infinite number comes back as NaN. Raises ValueError where it is no record of a step.

        Versions of a record differ in this: a newer one has fields that an older one lacks, each with a default. So what is not
        known here is left out, and what is missing has its default.
        """
        needed = [each.name for each in fields(cls) if each.default is MISSING and each.default_factory is MISSING]
        missing = [name for name in needed if name not in values]
        if missing or type(values["step"]) is not int:
            raise ValueError(f"not a record of a step: {missing or 'step is not a number'}")
        found = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        if not isinstance(found.get("own", {}), Mapping):
            raise ValueError("not a record of a step: own is no object")
        for name in ("loss", "learning_rate", "seconds", "tokens_per_s"):
            found[name] = math.nan if found[name] is None else float(found[name])
        return cls(**found)


def finite(value: Any) -> Any:
    """The value, or None for a number that JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
