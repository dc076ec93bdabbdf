"""The proofs behind `checker`: each yields one sentence per problem."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from cubeloom.pipeline import memory
from cubeloom.pipeline.action import COMPUTE, Action, Kind
from cubeloom.pipeline.dependencies import Token, maker, makes, needs, run
from cubeloom.pipeline.messages import Receive, Send, edges, programme, stuck
from cubeloom.pipeline.schedule import Row, Schedule, Updates


def names(schedule: Schedule) -> Iterator[str]:
    if min(schedule.stages, schedule.microbatches, len(schedule.workers)) < 1:
        yield (
            f"{schedule.stages} stages, {schedule.microbatches} micro-batches and {len(schedule.workers)} workers: "
            "there must be at least one of each"
        )
    for worker, action in schedule.actions:
        if not 0 <= action.stage < schedule.stages:
            yield f"{action} on worker {worker}: stages are 0 to {schedule.stages - 1}"
        if not 0 <= action.microbatch < schedule.microbatches:
            yield f"{action} on worker {worker}: micro-batches are 0 to {schedule.microbatches - 1}"
        if action.replica < 0:
            yield f"{action} on worker {worker}: a replica cannot be negative"
        if action.part is not None and (action.part not in (0, 1) or action.kind not in COMPUTE):
            yield f"{action} on worker {worker}: only computations have parts, and only .0 and .1"


def homes(schedule: Schedule) -> Iterator[str]:
    where: dict[tuple[int, int], set[int]] = defaultdict(set)
    for worker, action in schedule.actions:
        where[action.replica, action.stage].add(worker)
    for (replica, stage), workers in sorted(where.items()):
        if len(workers) > 1:
            listed = " and ".join(map(str, sorted(workers)))
            yield f"stage {stage} of replica {replica} has actions on workers {listed}; it can live on one only"
    for replica in range(schedule.replicas):
        for stage in range(schedule.stages):
            if (replica, stage) not in where:
                yield f"stage {stage} of replica {replica} is on no worker"


def completeness(schedule: Schedule) -> Iterator[str]:
    counts = Counter(action for _, action in schedule.actions)
    for action, count in counts.items():
        if count > 1:
            yield f"{action} happens {count} times"
    present = set(counts)
    owners: dict[int, set[int]] = defaultdict(set)
    for action in present:
        if action.kind in COMPUTE:
            owners[action.microbatch].add(action.replica)
    for microbatch in range(schedule.microbatches):
        if len(owners[microbatch]) != 1:
            listed = " and ".join(map(str, sorted(owners[microbatch]))) or "none"
            yield f"micro-batch {microbatch} is worked on by replicas {listed}; it needs exactly one"
            continue
        (replica,) = owners[microbatch]
        for stage in range(schedule.stages):
            yield from _once(present, stage, microbatch, replica)


def _once(actions: set[Action], stage: int, microbatch: int, replica: int) -> Iterator[str]:
    """One forward and one backward, which may be split into I and W; or the same for both halves."""
    full, split = (Kind.FORWARD, Kind.BACKWARD), (Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)
    kinds = {
        part: {k for k in COMPUTE if Action(stage, k, microbatch, replica, part) in actions} for part in (None, 0, 1)
    }
    for parts in ((None,), (0, 1)):
        rest = {None, 0, 1} - set(parts)
        if all(kinds[part] in (set(full), set(split)) for part in parts) and not any(kinds[part] for part in rest):
            return
    found = sorted(str(Action(stage, k, microbatch, replica, part)) for part, ks in kinds.items() for k in ks)
    forward, backward = (Action(stage, kind, microbatch, replica) for kind in full)
    yield (
        f"micro-batch {microbatch} on stage {stage} has {', '.join(found) or 'nothing'}; it needs {forward} and "
        f"{backward} (or its I and W), or the same for both halves .0 and .1"
    )


def local_order(schedule: Schedule) -> Iterator[str]:
    """On its worker a backward comes after its forward, and W after I."""
    for worker, row in enumerate(schedule.workers):
        made: set[Token] = set()
        for position, action in enumerate(row):
            for token in needs(action, schedule.stages):
                if token[1] == action.stage and token not in made:
                    yield f"worker {worker} does {action} at position {position}, before {maker(token)}"
            token_made = makes(action)
            if token_made:
                made.add(token_made)


def dependencies(schedule: Schedule) -> Iterator[str]:
    """Every worker reaches its end with buffered sends; otherwise yields the cycle of workers that wait for each other."""
    reached = run(schedule, lambda worker, action, wanted: None)
    behind = {w for w, row in enumerate(schedule.workers) if reached[w] < len(row)}
    if not behind:
        return
    makers = {makes(action): worker for worker, action in schedule.actions}
    done = {makes(action) for worker, row in enumerate(schedule.workers) for action in row[: reached[worker]]}
    waits: dict[int, tuple[Action, Token]] = {}
    for worker in behind:
        action = schedule.workers[worker][reached[worker]]
        waits[worker] = (action, next(token for token in needs(action, schedule.stages) if token not in done))
    for worker, (action, token) in sorted(waits.items()):
        if token not in makers:
            yield f"worker {worker} waits at {action} for {maker(token)}, which no worker does"
            return
    worker, chain = min(behind), []
    while worker not in chain:
        chain.append(worker)
        worker = makers[waits[worker][1]]
    circle = chain[chain.index(worker) :]
    said = [f"worker {w} waits at {waits[w][0]} for {maker(waits[w][1])}" for w in circle]
    yield "deadlock: " + ", ".join(said) + f" of worker {worker}"


def blocking(schedule: Schedule) -> Iterator[str]:
    """With its sends and receives inserted, the schedule ends under rendezvous transfers, and each edge keeps its
    order.
    """
    steps = programme(schedule)
    for worker, step in stuck(steps).items():
        if isinstance(step, Send | Receive):
            verb = "send" if isinstance(step, Send) else "receive"
            yield f"with blocking sends worker {worker} never gets to {verb} {step.message}"
    received: dict[tuple[int, int], list[object]] = defaultdict(list)
    for row in steps:
        for step in row:
            if isinstance(step, Receive):
                received[step.message.source, step.message.target].append(step.message)
    for (source, target), sent in edges(steps).items():
        if received[source, target] != sent:
            yield f"on the edge {source} -> {target} receives are not in the order of sends"


def reductions(schedule: Schedule) -> Iterator[str]:
    """A schedule without R actions reduces every stage at the end of the step, in the order of stages."""
    reduced = [(w, action) for w, action in schedule.actions if action.kind is Kind.REDUCE]
    if not reduced:
        return
    if schedule.updates is not Updates.FLUSH:
        yield f"{reduced[0][1]}: a schedule with updates in its stream has no reductions"
    counts = Counter((action.replica, action.stage) for _, action in reduced)
    for (replica, stage), worker in sorted(schedule.homes.items()):
        count = counts[replica, stage]
        if count != 1:
            yield f"stage {stage} of replica {replica} on worker {worker} reduces its gradients {count} times, not once"
    for worker, row in enumerate(schedule.workers):
        yield from _reduced_early(worker, row)
    yield from _crossed(schedule)


def _reduced_early(worker: int, row: Row) -> Iterator[str]:
    done: dict[tuple[int, int], Action] = {}
    last: dict[tuple[int, int], int] = {}
    for action in row:
        home = (action.replica, action.stage)
        if action.kind is Kind.REDUCE:
            done[home] = action
            if last.get(home) != action.microbatch:
                yield f"{action} on worker {worker} comes after micro-batch {last.get(home)}, not {action.microbatch}"
        elif action.makes_weight_grad:
            last[home] = action.microbatch
            if home in done:
                yield f"worker {worker} reduces at {done[home]}, before its gradient {action}"


def _crossed(schedule: Schedule) -> Iterator[str]:
    """Two workers that both reduce two stages must launch them in the same order, or they deadlock."""
    first: dict[tuple[int, int], int] = {}
    for worker, row in enumerate(schedule.workers):
        stages = list(dict.fromkeys(action.stage for action in row if action.kind is Kind.REDUCE))
        for i, before in enumerate(stages):
            for after in stages[i + 1 :]:
                first.setdefault((before, after), worker)
                if (after, before) in first:
                    other = first[after, before]
                    yield (f"worker {worker} reduces stage {before} before {after}, worker {other} the other way round")


def updates(schedule: Schedule) -> Iterator[str]:
    """Every gradient is part of one update, and every stage has the same groups of updates."""
    if schedule.updates is Updates.FLUSH:
        return
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for worker, row in enumerate(schedule.workers):
        yield from _weights_in_time(schedule, worker)
        pending: dict[tuple[int, int], set[int]] = defaultdict(set)
        for action in row:
            home = (action.replica, action.stage)
            if action.makes_weight_grad:
                pending[home].add(action.microbatch)
            elif action.kind is Kind.UPDATE:
                group = tuple(sorted(pending.pop(home, ())))
                found.setdefault(home, []).append(group)
                if group[-1:] != (action.microbatch,):
                    yield f"{action} on worker {worker} takes in micro-batches {list(group)}"
        for (_, stage), left in pending.items():
            yield f"the gradients of micro-batches {sorted(left)} of stage {stage} go into no update"
    for (_, stage), groups in found.items():
        if schedule.updates is Updates.NEWEST and any(len(group) > 1 for group in groups):
            yield f"stage {stage} updates after some micro-batches only, others after each"
        elif schedule.updates is Updates.PREVIOUS and groups != next(iter(found.values())):
            yield f"stage {stage} does not update after the same micro-batches as the others"


def _weights_in_time(schedule: Schedule, worker: int) -> Iterator[str]:
    made: Counter[tuple[int, int]] = Counter()
    used = memory.versions(schedule, worker)
    for action in schedule.workers[worker]:
        home = (action.replica, action.stage)
        if action.kind is Kind.UPDATE:
            made[home] += 1
        elif action.kind is Kind.FORWARD and used[*home, action.microbatch] > made[home]:
            version = used[*home, action.microbatch]
            yield f"{action} on worker {worker} asks for weights {version} before its stage made them"


def memory_cap(schedule: Schedule, cap: float) -> Iterator[str]:
    for worker, row in enumerate(schedule.workers):
        held = memory.in_flight(row) * schedule.chunk
        if held > cap + 1e-9:
            yield f"worker {worker} holds the activations of {held:g} micro-batches, over the cap of {cap:g}"
