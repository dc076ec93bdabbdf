"""Every schedule by name: functions from stages, micro-batches and options to a `Schedule`.

`stages` is the number of workers that share the model. If a worker holds several chunks (interleaved, ZBV, DualPipeV,
Hanayo) the schedule has that many times more stages, each that much smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.base.registry import Registry, nearest
from cubeloom.pipeline.costs import Costs
from cubeloom.pipeline.schedule import Schedule
from cubeloom.pipeline.schedules._common import not_too_long
from cubeloom.pipeline.schedules.auto import Placement, auto
from cubeloom.pipeline.schedules.chimera import Mode, chimera
from cubeloom.pipeline.schedules.chimera_zb import chimera_zb
from cubeloom.pipeline.schedules.dualpipe import dualpipe, dualpipev
from cubeloom.pipeline.schedules.gems import gems
from cubeloom.pipeline.schedules.gpipe import gpipe
from cubeloom.pipeline.schedules.hanayo import hanayo
from cubeloom.pipeline.schedules.interleaved import interleaved
from cubeloom.pipeline.schedules.one_f_one_b import one_f_one_b
from cubeloom.pipeline.schedules.pipedream import pipedream, pipedream_2bw
from cubeloom.pipeline.schedules.zbv import zbv
from cubeloom.pipeline.schedules.zero_bubble import zb_h1, zb_h2


@dataclass(frozen=True)
class Family:
    """A named schedule: its generator, the options it takes besides stages and micro-batches, and its description."""

    make: Callable[..., Schedule]
    summary: str
    options: frozenset[str] = frozenset()
    synchronous: bool = True


def _auto(stages: int, microbatches: int, **options: Any) -> Schedule:
    return auto(stages, microbatches, **options).schedule


_FAMILIES: dict[str, Family] = {
    "gpipe": Family(gpipe, "all forwards, then all backwards"),
    "1f1b": Family(one_f_one_b, "a forward and a backward in turn (DAPPLE)"),
    "interleaved": Family(interleaved, "1F1B with several chunks a worker", frozenset({"chunks"})),
    "gems": Family(gems, "two directions, one micro-batch at a time"),
    "zb-h1": Family(zb_h1, "split backward, as little memory as 1F1B", frozenset({"chunks"})),
    "zb-h2": Family(zb_h2, "split backward, no bubble inside, twice the memory"),
    "zbv": Family(zbv, "split backward on a V of two chunks a worker"),
    "dualpipe": Family(dualpipe, "two directions, split backward at both ends"),
    "dualpipev": Family(dualpipev, "DualPipe's order on a V of two chunks a worker"),
    "hanayo": Family(hanayo, "waves: chunks down and up the workers", frozenset({"chunks"})),
    "pipedream": Family(pipedream, "no flush, an update after every micro-batch", synchronous=False),
    "pipedream-2bw": Family(pipedream_2bw, "no flush, two versions of the weights", synchronous=False),
    "chimera": Family(chimera, "pipelines in opposite directions", frozenset({"pairs", "mode"})),
    "chimera-zb": Family(chimera_zb, "Chimera with split backward", frozenset({"pairs", "costs", "tries"})),
    "auto": Family(_auto, "the fastest order found", frozenset({"costs", "cap", "placement", "pairs", "tries"})),
}
FAMILIES: Registry[Family] = Registry("schedule", _FAMILIES)


def names() -> list[str]:
    return list(FAMILIES)


def family(name: str) -> Family:
    return FAMILIES.find(name)


def generate(
    name: str,
    stages: int,
    microbatches: int,
    *,
    pairs: int | None = None,
    mode: Mode | str | None = None,
    chunks: int | None = None,
    costs: Costs | None = None,
    cap: float | None = None,
    placement: Placement | str | None = None,
    tries: int | None = None,
) -> Schedule:
    """The schedule of that name. An option that it does not take is refused, except costs, which most orders ignore.

    `tries` limits the search of the schedules that search.
    """
    made_by = family(name)
    given: dict[str, Any] = {
        "pairs": pairs,
        "mode": None if mode is None else _choice(Mode, "mode", mode),
        "chunks": chunks,
        "cap": cap,
        "tries": tries,
        "placement": None if placement is None else _choice(Placement, "placement", placement),
    }
    options = {option: value for option, value in given.items() if value is not None}
    for option in options:
        if option not in made_by.options:
            takers = ", ".join(other for other, rival in FAMILIES.items() if option in rival.options)
            raise UserError(f"{name} has no option {option}; it is one of {takers}")
    if costs is not None and "costs" in made_by.options:
        options["costs"] = costs
    not_too_long(name, stages, microbatches, chunks or 1)
    return made_by.make(stages, microbatches, **options)


def _choice(kind: type[Mode] | type[Placement], what: str, text: str) -> Mode | Placement:
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"unknown {what} {text!r}{nearest(text, kind)} There are {', '.join(kind)}") from None
