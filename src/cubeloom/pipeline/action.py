"""One action of a worker: a kind of work on a micro-batch, on one stage of one replica of the model."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from cubeloom.base.errors import UserError


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"  # both gradients: I, then W
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    REDUCE = "R"  # start to reduce this stage's gradients over its replicas; awaited at the end of the step
    UPDATE = "U"  # an optimizer step within the step: only in asynchronous schedules


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
_TEXT = re.compile(r"(\d+)([FBIWRU])(\d+)(?:\.([01]))?(?:@(\d+))?")


class Action(NamedTuple):
    """`2F0` is the forward of micro-batch 0 on stage 2, `2F0@1` the same on the second replica of that stage.

    `2B0.1` is the backward of the second half of micro-batch 0: backward halving cuts micro-batches in two, runs the
    forwards of the halves one after the other and their backwards separately. `2R5` and `2U5` name the last micro-batch
    that they include.
    """

    stage: int
    kind: Kind
    microbatch: int
    replica: int = 0
    part: int | None = None

    def __str__(self) -> str:
        part = "" if self.part is None else f".{self.part}"
        where = f"@{self.replica}" if self.replica else ""
        return f"{self.stage}{self.kind}{self.microbatch}{part}{where}"

    @classmethod
    def parse(cls, text: str) -> Action:
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise UserError(f"not an action: {text!r}; expected for instance 2F0, 2F0@1 or 2B0.1")
        stage, kind, microbatch, part, replica = match.groups()
        return cls(int(stage), Kind(kind), int(microbatch), int(replica or 0), None if part is None else int(part))

    @property
    def size(self) -> float:
        """The fraction of the micro-batch that the action works on."""
        return 1.0 if self.part is None else 0.5

    @property
    def makes_input_grad(self) -> bool:
        return self.kind in (Kind.BACKWARD, Kind.INPUT_GRAD)

    @property
    def makes_weight_grad(self) -> bool:
        """Whether the activations of (this part of) the micro-batch can be freed after it."""
        return self.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)


def forward(stage: int, microbatch: int, replica: int = 0, part: int | None = None) -> Action:
    return Action(stage, Kind.FORWARD, microbatch, replica, part)


def backward(stage: int, microbatch: int, replica: int = 0, part: int | None = None) -> Action:
    return Action(stage, Kind.BACKWARD, microbatch, replica, part)


def input_grad(stage: int, microbatch: int, replica: int = 0) -> Action:
    return Action(stage, Kind.INPUT_GRAD, microbatch, replica)


def weight_grad(stage: int, microbatch: int, replica: int = 0) -> Action:
    return Action(stage, Kind.WEIGHT_GRAD, microbatch, replica)
