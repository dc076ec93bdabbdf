"""`cubeloom schedule`: generates, checks, simulates and draws pipeline schedules, or compares several."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

import cubeloom.pipeline as pipeline
from cubeloom.base import settings
from cubeloom.base.errors import UserError
from cubeloom.base.files import write_asked
from cubeloom.pipeline import drawing as show
from cubeloom.pipeline.costs import Costs, parse_costs, scaled
from cubeloom.pipeline.files import as_dict
from cubeloom.pipeline.schedules import FAMILIES, family
from cubeloom.pipeline.schedules._common import not_too_long
from cubeloom.pipeline.schedules.auto import Placement, auto
from cubeloom.train.job.job import Job

FILES = (".toml", ".py")
Format = Literal["table", "text", "csv", "json", "svg", "html", "perfetto"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Generate a pipeline schedule, prove that it can run, and print, draw or save it with its time and memory.

    Names: gpipe, 1f1b, interleaved, gems, zb-h1, zb-h2, zbv, dualpipe, dualpipev, hanayo, pipedream, pipedream-2bw,
    chimera, chimera-zb, auto.
    """

    name: tyro.conf.Positional[str | None] = None
    """The schedule, or a settings file whose job has one; leave it out to --compare several or to --load one. A Python
    recipe (.py) is executed.
    """
    stages: int | None = None
    """Number of workers that share the model."""
    microbatches: int | None = None
    compare: str | None = None
    """Names separated by commas: draw them one above the other, on one scale."""
    load: Path | None = None
    """A schedule saved as text, CSV or JSON, instead of a name."""
    pairs: int | None = None
    """Pairs of pipelines in opposite directions (chimera, chimera-zb, auto): a divisor of half the stages."""
    mode: Literal["direct", "doubling", "halving"] | None = None
    """How chimera continues after its first D micro-batches."""
    chunks: int | None = None
    """Stages per worker (interleaved, zb-h1, hanayo)."""
    costs: str = "F=1,I=1,W=1,p2p=0"
    """Times of forward, input gradient and weight gradient of a worker's share, and of a message."""
    cap: float | None = None
    """The most micro-batches whose activations a worker may hold (auto)."""
    placement: Literal["linear", "looped", "v", "bidirectional", "any"] | None = None
    """The placements of stages that auto may use."""
    sync: Literal["end", "eager", "eager-opt"] | None = None
    """When replicas start to reduce their gradients: adds R actions to the rows."""
    reduce: float = 0.0
    """The time to reduce the gradients of a worker's share over its replicas."""
    recompute: bool = False
    """Keep only the stages' inputs, and recompute forwards in the backwards."""
    format: Format = "table"
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """A file to write to, instead of the terminal."""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def __call__(self) -> int:
        file = Path(self.name) if self.name is not None and Path(self.name).suffix in FILES else None
        if self.overrides and file is None:
            raise UserError(f"{self.overrides[0]} is a setting of a file, and no settings file was given")
        if file is not None:
            made = [self._of_job(file)]
        elif self.load is not None:
            made = [self._loaded(self.load)]
        else:
            made = [self._made(name) for name in self._names()]
        schedules = [self._synchronised(schedule) for schedule, _ in made]
        timelines = [pipeline.simulate(pipeline.check(s), self._costs(s)) for s in schedules]
        text = self._text(timelines, [note for _, note in made])
        if self.output is None:
            sys.stdout.write(text if text.endswith("\n") else text + "\n")
        else:
            write_asked(self.output, text)
        return 0

    def _names(self) -> list[str]:
        if (self.name is None) == (self.compare is None):
            raise UserError("give either the NAME of one schedule, or --compare NAME,NAME,..., or --load FILE")
        if self.stages is None or self.microbatches is None:
            raise UserError("a schedule needs --stages and --microbatches, for instance --stages 8 --microbatches 8")
        names = [self.name] if self.name else [name.strip() for name in (self.compare or "").split(",") if name.strip()]
        if not names:
            raise UserError("--compare needs names, for instance --compare 1f1b,chimera,chimera-zb")
        for option in ("pairs", "mode", "chunks", "cap", "placement"):
            takers = [name for name in FAMILIES if option in FAMILIES[name].options]
            if getattr(self, option) is not None and not any(option in family(name).options for name in names):
                raise UserError(f"{', '.join(names)}: no option {option}; it is one of {', '.join(takers)}")
        return names

    def _made(self, name: str) -> tuple[pipeline.Schedule, str]:
        """The schedule, and a note about it."""
        assert self.stages is not None and self.microbatches is not None
        not_too_long(name, self.stages, self.microbatches)
        timing = parse_costs(self.costs)
        costs = None
        if self.stages > 0:
            costs = Costs.uniform(self.stages, timing["F"], timing["I"], timing["W"], timing["p2p"])
            costs = replace(costs, recompute=frozenset(range(self.stages) if self.recompute else ()))
        if name == "auto":
            placement = Placement(self.placement or "any")
            plan = auto(self.stages, self.microbatches, costs, self.cap, placement, self.pairs or 1)
            rival = f"; the best named one takes {plan.rivals[0][1]:g} ({plan.rivals[0][0]})" if plan.rivals else ""
            return plan.schedule, f"{plan.gap:.1%} above the lower bound of {plan.bound:g}{rival}"
        taken = family(name).options
        given = {"pairs": self.pairs, "mode": self.mode, "chunks": self.chunks}
        options = {option: value for option, value in given.items() if option in taken}
        made = pipeline.generate(name, self.stages, self.microbatches, costs=costs, **options)  # type: ignore[arg-type]
        return made, ""

    def _of_job(self, file: Path) -> tuple[pipeline.Schedule, str]:
        for option in ("stages", "microbatches", "pairs", "mode", "chunks"):
            if getattr(self, option) is not None:
                raise UserError(
                    f"--{option} is what {file} says: leave it out, or change it as --schedule.{option}=… or --grid.pipe=…"
                )
        job = settings.load(Job, file, self.overrides)
        return job.schedule.schedule(job.grid.pipe), ""

    def _loaded(self, path: Path) -> tuple[pipeline.Schedule, str]:
        if self.name is not None or self.compare is not None:
            raise UserError("--load takes the schedule from a file: leave out NAME and --compare")
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UserError(f"{path} is no text, and so no schedule") from None
        readers = {".json": pipeline.from_json, ".csv": pipeline.from_csv}
        return readers.get(path.suffix, pipeline.Schedule.parse)(text), ""

    def _synchronised(self, schedule: pipeline.Schedule) -> pipeline.Schedule:
        return schedule if self.sync is None else pipeline.synchronised(schedule, pipeline.Sync(self.sync))

    def _costs(self, schedule: pipeline.Schedule) -> Costs:
        if not 0 <= self.reduce < inf:
            raise UserError(f"--reduce {self.reduce}: a cost is a finite number, zero or more")
        costs = scaled(parse_costs(self.costs), schedule)
        reduce = (self.reduce * schedule.chunk,) * schedule.stages
        every = frozenset(range(schedule.stages))
        return replace(costs, reduce=reduce, recompute=every if self.recompute else frozenset())

    def _text(self, timelines: list[pipeline.Timeline], notes: list[str]) -> str:
        schedules = [timeline.schedule for timeline in timelines]
        match self.format:
            case "text":
                return "\n\n".join(map(str, schedules))
            case "csv":
                if len(schedules) > 1:
                    raise UserError("CSV holds one schedule; compare with --format json, table, svg, html or perfetto")
                return pipeline.to_csv(schedules[0])
            case "json":
                dicts = [as_dict(timeline.schedule, timeline.costs) for timeline in timelines]
                return json.dumps(dicts[0] if self.compare is None else dicts)
            case "svg":
                return show.to_svg(timelines, notes)
            case "html":
                return show.to_html(timelines, notes)
            case "perfetto":
                return show.to_trace(timelines)
            case _:
                return self._table(timelines, notes)

    def _table(self, timelines: list[pipeline.Timeline], notes: list[str]) -> str:
        terminal = Console()
        colours = self.output is None and terminal.is_terminal and terminal.color_system is not None
        text = io.StringIO()
        console = Console(
            file=text,
            width=max(80, terminal.width),
            force_terminal=colours,
            color_system=terminal.color_system if colours else None,  # type: ignore[arg-type]
        )
        console.print(show.drawing(timelines, console.width, colours))
        console.print(show.summary(timelines))
        for timeline, note in zip(timelines, notes, strict=True):
            if note:
                console.print(f"{timeline.schedule.name}: {note}", highlight=False, soft_wrap=True)
        return text.getvalue()
