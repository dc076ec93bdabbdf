"""When one worker of a programme asks for its messages: as early as it can, or when they are on their way.

Either way receives on one edge keep the order of sends.
"""

from __future__ import annotations

from cubeloom.pipeline.action import Action
from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.dependencies import makes, needs
from cubeloom.pipeline.messages import Receive, Send, Step, edges, programme
from cubeloom.pipeline.schedule import Schedule
from cubeloom.pipeline.simulator import simulate


def receiving_early(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """One worker's programme with each receive before the action that it stood behind, so that its buffer waits for the send.

    For transfers that neither block nor queue; with others it could deadlock. Receives keep their order.
    """
    early: list[Step] = []
    for step in steps:
        place = len(early)
        if isinstance(step, Receive):
            # Behind the action before the last one: over sends, and over one action.
            while place and isinstance(early[place - 1], Send):
                place -= 1
            if place and isinstance(early[place - 1], Action):
                place -= 1
        early.insert(place, step)
    return tuple(early)


def receiving_in_time(schedule: Schedule, worker: int, costs: Costs | None = None) -> tuple[Step, ...]:
    """One worker's programme with each receive where its message has been sent already, at the latest where it is needed.

    For transfers that hold up computation while they wait, as NCCL's do, which occupy multiprocessors. Sends must not wait
    for their receives.
    """
    timeline = simulate(schedule, costs)
    whole = programme(schedule, costs)
    row = schedule.workers[worker]
    sent_at = {makes(action): timeline.span(action).end for _, action in schedule.actions}
    taken_at = {token: place for place, action in enumerate(row) for token in needs(action, schedule.stages)}
    # Where both come to the same moment the sender may well be late.
    margin = 0.5 * min(timeline.costs.forward)
    arriving: dict[int, list[Step]] = {place: [] for place in range(len(row))}
    for (_, target), messages in edges(whole).items():
        if target != worker:
            continue
        place = len(row)
        for message in reversed(messages):
            ready = sent_at[message.token] + margin
            latest = min(place, taken_at[message.token])
            place = next((p for p in range(latest) if timeline.span(row[p]).start >= ready), latest)
            arriving[place].insert(0, Receive(message))
    steps: list[Step] = []
    places = iter(range(len(row)))
    for step in whole[worker]:
        if isinstance(step, Action):
            steps += arriving[next(places)]
        if not isinstance(step, Receive):
            steps.append(step)
    return tuple(steps)
