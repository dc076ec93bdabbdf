"""When a worker posts its receives: as early as possible, or when their messages are on their way.

In both cases the receives on one edge keep the order of the sends.
"""

from __future__ import annotations

from cubeloom.pipeline.action import Action
from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.dependencies import makes, needs
from cubeloom.pipeline.messages import Receive, Send, Step, edges, programme
from cubeloom.pipeline.schedule import Schedule
from cubeloom.pipeline.simulator import simulate


def receiving_early(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """One worker's program with each receive moved one action earlier, so that its buffer is ready for the send.

    For transfers that neither block nor queue; with others it could deadlock. Receives keep their order.
    """
    early: list[Step] = []
    for step in steps:
        place = len(early)
        if isinstance(step, Receive):
            # After the second-to-last action: move over sends, and over one action.
            while place and isinstance(early[place - 1], Send):
                place -= 1
            if place and isinstance(early[place - 1], Action):
                place -= 1
        early.insert(place, step)
    return tuple(early)


def receiving_in_time(schedule: Schedule, worker: int, costs: Costs | None = None) -> tuple[Step, ...]:
    """One worker's program with each receive placed after its message has been sent, and at the latest where it is
    needed.

    For transfers that slow computation while they wait. NCCL's do, because they occupy multiprocessors. Sends must not
    wait for their receives.
    """
    timeline = simulate(schedule, costs)
    whole = programme(schedule, costs)
    row = schedule.workers[worker]
    sent_at = {makes(action): timeline.span(action).end for _, action in schedule.actions}
    taken_at = {token: place for place, action in enumerate(row) for token in needs(action, schedule.stages)}
    # The sender may be later than simulated: add half a forward.
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
