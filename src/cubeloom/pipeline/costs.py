"""The costs of actions and messages, per stage, in any unit of time and of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cubeloom.base.errors import UserError
from cubeloom.pipeline.action import Action, Kind
from cubeloom.pipeline.schedule import Schedule

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """Times and sizes of each stage for one micro-batch. `message` is the time from one worker to another."""

    forward: Numbers
    input_grad: Numbers
    weight_grad: Numbers
    message: float = 0.0
    activation: Numbers = ()  # kept from a forward to its weight gradient; 1 per stage by default
    weights: Numbers = ()  # 1 per stage by default
    reduce: Numbers = ()  # time to reduce a stage's gradients over its replicas; 0 by default
    drag: float = 0.0  # the fraction of a reduction's time by which it slows the computation it overlaps
    recompute: frozenset[int] = frozenset()  # stages that keep only their input and recompute their forward
    boundary: float = 0.0  # the size of that input, as a fraction of the stage's activations

    def __post_init__(self) -> None:
        count = len(self.forward)
        for name, default in (("activation", 1.0), ("weights", 1.0), ("reduce", 0.0)):
            if not getattr(self, name):
                object.__setattr__(self, name, (default,) * count)
        for name in ("input_grad", "weight_grad", "activation", "weights", "reduce"):
            if len(getattr(self, name)) != count:
                raise UserError(f"costs for {count} stages: {name} has {len(getattr(self, name))} entries")
        for name in ("forward", "input_grad", "weight_grad", "activation", "weights", "reduce"):
            if min(getattr(self, name), default=0.0) < 0:
                raise UserError(f"costs cannot be negative: {name} = {getattr(self, name)}")
        if self.message < 0:
            raise UserError(f"costs cannot be negative: message = {self.message}")

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward: float = 1.0,
        input_grad: float = 1.0,
        weight_grad: float = 1.0,
        message: float = 0.0,
        chunk: float = 1.0,
    ) -> Costs:
        """Equal costs for every stage. The times are those of one worker's share; a stage is the fraction `chunk` of
        it.
        """

        def each(value: float) -> Numbers:
            return (value * chunk,) * stages

        return cls(each(forward), each(input_grad), each(weight_grad), message, each(1.0), each(1.0))

    @classmethod
    def like(
        cls,
        schedule: Schedule,
        forward: float = 1.0,
        input_grad: float = 1.0,
        weight_grad: float = 1.0,
        message: float = 0.0,
    ) -> Costs:
        """Uniform costs in which each worker's share costs the same, however many stages it is cut into."""
        return cls.uniform(schedule.stages, forward, input_grad, weight_grad, message, schedule.chunk)

    def cut(self, chunks: int) -> Costs:
        """The costs if every stage is cut into this many equal stages."""

        def each(values: Numbers) -> Numbers:
            return tuple(value / chunks for value in values for _ in range(chunks))

        return replace(
            self,
            forward=each(self.forward),
            input_grad=each(self.input_grad),
            weight_grad=each(self.weight_grad),
            activation=each(self.activation),
            weights=each(self.weights),
            reduce=each(self.reduce),
            recompute=frozenset(s * chunks + i for s in self.recompute for i in range(chunks)),
        )

    def part(self, share: float) -> Costs:
        """The costs of a fraction of each micro-batch."""

        def each(values: Numbers) -> Numbers:
            return tuple(value * share for value in values)

        return replace(
            self,
            forward=each(self.forward),
            input_grad=each(self.input_grad),
            weight_grad=each(self.weight_grad),
            activation=each(self.activation),
            message=self.message * share,
        )

    def time(self, action: Action) -> float:
        """The time that an action occupies its worker."""
        s = action.stage
        if action.kind is Kind.FORWARD:
            return self.forward[s] * action.size
        whole = 0.0
        if action.makes_input_grad:
            whole += self.input_grad[s] + (self.forward[s] if s in self.recompute else 0.0)
        if action.makes_weight_grad:
            whole += self.weight_grad[s]
        return whole * action.size


def parse_costs(text: str) -> dict[str, float]:
    """Parses `F=1,I=1,W=1,p2p=0`; missing entries keep their defaults."""
    costs = {"F": 1.0, "I": 1.0, "W": 1.0, "p2p": 0.0}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        name = name.strip()
        if name not in costs:
            raise UserError(f"unknown cost {name!r} in {text!r}; the costs are {', '.join(costs)}")
        try:
            costs[name] = float(value)
        except ValueError:
            raise UserError(
                f"{name} = {value!r} is not a number, in {text!r}; for instance F=1,I=1,W=1,p2p=0"
            ) from None
        if not 0 <= costs[name] < float("inf"):
            raise UserError(f"{name} = {value} in {text!r}: a cost is a finite number, zero or more")
    return costs


def scaled(text: Mapping[str, float], schedule: Schedule) -> Costs:
    """Parsed costs for this schedule."""
    return Costs.like(schedule, text["F"], text["I"], text["W"], text["p2p"])
