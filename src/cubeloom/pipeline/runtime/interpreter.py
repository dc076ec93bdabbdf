"""Executes one worker's program: actions in order, results passed on, messages sent and awaited.

It has no code for Chimera or any other family, nor for models. Replicas, split backwards, doubled forwards and halved
micro-batches are all in the rows; `Work` computes the actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from cubeloom.pipeline import Action, Kind
from cubeloom.pipeline.dependencies import Token, makes
from cubeloom.pipeline.messages import Receive, Send, Step
from cubeloom.pipeline.runtime.channels import Boundary, Channels
from cubeloom.pipeline.runtime.stage import Carry


class PipelineError(RuntimeError):
    """A step that failed. Says which rank, at which action, waited for which peer, and what it finished last."""


class Work(Protocol):
    """Computes one worker's actions."""

    def forward(self, action: Action, inputs: Carry) -> Carry:
        """A stage's output. The first stage gets no inputs, and the last stage's output is not sent."""
        ...

    def backward(self, action: Action, gradients: Carry) -> Carry:
        """The gradients of a stage's inputs, for B and I. The last stage gets none, and the first stage's are not sent."""
        ...

    def other(self, action: Action) -> None:
        """W, R and U, which need nothing from other workers and send nothing."""
        ...


class Observer(Protocol):
    """Is called when each action begins and ends."""

    def at(self, place: str) -> None: ...

    def done(self, action: str) -> None: ...


class Interpreter:
    """`boundaries`: the tensors that each stage sends to the next. `observers` are told of every action."""

    def __init__(
        self,
        work: Work,
        channels: Channels,
        boundaries: Mapping[int, Boundary],
        stages: int,
        where: str,
        observers: Sequence[Observer] = (),
    ) -> None:
        self._work = work
        self._channels = channels
        self._boundaries = boundaries
        self._last = stages - 1
        self._where = where
        self._observers = observers
        self._made: dict[Token, Carry] = {}  # results on this worker that are not used yet
        self._finished = "nothing"

    def run(self, programme: tuple[Step, ...]) -> None:
        step: Step | str = "start"
        try:
            for step in programme:
                if isinstance(step, Action):
                    self._act(step)
                elif isinstance(step, Send):
                    self._channels.send(step.message, self._made.pop(step.message.token))
                else:
                    self._receive(step)
            step = "end"
            self._channels.finish()
        except RuntimeError as error:
            raise PipelineError(f"{self._where}, at {step}, after {self._finished}: {error}") from error

    def _receive(self, step: Receive) -> None:
        what, stage, *_ = step.message.token
        # The gradient of a stage's input has the shape of the previous stage's output.
        self._channels.receive(step.message, self._boundaries[stage if what == "F" else stage - 1])

    def _act(self, action: Action) -> None:
        name = str(action)
        for observer in self._observers:
            observer.at(name)
        self._carry_out(action)
        for observer in self._observers:
            observer.done(name)
        self._finished = name

    def _carry_out(self, action: Action) -> None:
        stage, portion = action.stage, (action.microbatch, action.part)
        if action.kind is Kind.FORWARD:
            result = self._work.forward(action, self._take(("F", stage - 1, *portion)) if stage else {})
            wanted = stage < self._last
        elif action.makes_input_grad:
            result = self._work.backward(action, self._take(("I", stage + 1, *portion)) if stage < self._last else {})
            wanted = stage > 0
        else:
            self._work.other(action)
            return
        if wanted:
            token = makes(action)
            assert token is not None
            self._made[token] = result

    def _take(self, token: Token) -> Carry:
        """A result of this worker, or of another one by message."""
        return self._made.pop(token) if token in self._made else self._channels.take(token)
