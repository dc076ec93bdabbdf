"""The measurements of one step of training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Record:
    step: int
    """From 0, as for the learning rate."""
    loss: float
    gradient_norm: float | None
    """None if a schedule updates weights within a step: there is no gradient of the whole step."""
    learning_rate: float
    seconds: float
    tokens_per_s: float
    """Of the whole grid."""
    mfu: float | None = None
    """None if the device's peak is unknown."""
    memory_bytes: int | None = None
    """The highest peak of any rank."""
    computing_s: float | None = None
    exposed_s: float | None = None
    """Exposed communication."""
    bubble_s: float | None = None
    skipped: str | None = None
    """Why the update was skipped, if it was."""
    validation: float | None = None
    """The validation loss, if there was an evaluation after this step."""

    own: Mapping[str, float] = field(default_factory=dict)
    """Metrics of callbacks, by their names."""

    @property
    def remarkable(self) -> bool:
        """Whether the step is always kept and shown."""
        return self.skipped is not None or self.validation is not None

    def as_json(self) -> dict[str, Any]:
        """All fields. JSON has no NaN and no infinity: such a number is null."""
        found = {each.name: finite(getattr(self, each.name)) for each in fields(self)}
        return found | {"own": {name: finite(value) for name, value in self.own.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Record:
        """The inverse, except that an infinite number becomes NaN. Raises ValueError if it is not a record of a step.

        Versions differ in their fields: a newer version has additional fields, each with a default. Unknown fields are
        ignored, and missing ones get their defaults.
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
    """The value, or None for a number that JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
