"""`cubeloom verify`: train the same steps serially and on a grid, and compare everything."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from math import inf, lcm
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

from cubeloom import models
from cubeloom.base import dtypes
from cubeloom.base.errors import UserError
from cubeloom.base.grid import AXES, Grid
from cubeloom.base.limits import SAMPLES, duration, of_model, share, within
from cubeloom.base.settings import load
from cubeloom.comm.kinds import CPU, Kind
from cubeloom.models.configs import LanguageConfig
from cubeloom.models.named import named
from cubeloom.models.presets import PRESETS, config
from cubeloom.parallel import Batch
from cubeloom.parallel.config import Activations, GradientDtype, Inputs, Precision, Weights
from cubeloom.pipeline import Schedule, Sync, generate, overlapped, synchronised
from cubeloom.train.job.job import Job
from cubeloom.train.job.settings import SHARES

if TYPE_CHECKING:
    from cubeloom.models import ModelSource
    from cubeloom.tools.verify import Experiment, Report

# Sizes that may be chosen instead of a preset's.
SIZES = {"layers": "number of layers", "vocab": "vocabulary", "kv_heads": "key-value heads"}
# Options that a settings file leaves to the command line.
_OUR_OWN = {"file", "overrides", "steps", "dtype", "patience", "seed", "device", "share_gpu", "json"}


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Train the same steps serially and on a grid of local processes, and compare loss, gradients, weights and bytes.

    Exits 0 only if all agree, 1 if something differs, 2 if the request is invalid.
    """

    file: tyro.conf.Positional[Path | None] = None
    """A settings file that gives model, batch, grid, schedule and layout instead of the options here; --a.b=c changes
    them. A Python recipe (.py) is executed.
    """
    model: str = "gpt-tiny"
    """A preset, such as gpt-tiny, llama-tiny or bert-tiny; a Hugging Face folder; or file.py:function, which is executed."""
    grid: str = "x=2,y=2,z=2"
    """Sizes of the axes pipe, data, z, y, x; others are 1."""
    placement: str = ",".join(AXES)
    """The order of the axes on the ranks, from outermost to innermost."""
    rest: Activations | None = None
    """How activations are stored between layers, along the axis that does not index them: by default sharded, and
    replicated for a model whose cut is found automatically.
    """
    weights: Weights = "freed"
    """Weights along z: sharded, and the gathered copy freed or kept between forward and backward; or replicated."""
    inputs: Inputs = "kept"
    """For the weight gradient: keep the gathered input, or only its shard, which is gathered again."""
    gradients: GradientDtype = "float32"
    """Gradients of weights with a lower precision than float32: accumulated and reduced in float32, or in the model's
    dtype.
    """
    precision: Precision = "model"
    """Operands of the linears of blocks: in the model's dtype, or rounded to FP8."""
    schedule: str | None = None
    """The pipeline schedule, if the grid has a pipeline: a name of `cubeloom schedule`; by default 1f1b."""
    microbatches: int | None = None
    """By default two per worker."""
    pairs: int | None = None
    """Pairs of pipelines of chimera."""
    mode: Literal["direct", "doubling", "halving"] | None = None
    """How chimera continues after its first unit of micro-batches."""
    sync: Literal["end", "eager", "eager-opt"] | None = None
    """When replicas of a stage reduce their gradients."""
    ways: int = 1
    """Strands of a weave: while one waits for a collective, another computes."""
    recompute: bool = False
    """Recompute: keep only the inputs of each block."""
    compile: bool = False
    """Let torch compile the code between collectives; the first step then takes longer."""
    record: bool = False
    """Record the actions of a stage as CUDA graphs; on a GPU."""
    layers: int | None = None
    """Number of layers, instead of the preset's: a stage needs at least one of them, or the embedding, or the head."""
    vocab: int | None = None
    """Vocabulary size, instead of the preset's."""
    kv_heads: int | None = None
    """Number of key-value heads, instead of the preset's."""
    steps: int = 3
    batch: int | None = None
    """Samples in a step, over the whole grid; by default two per rank of data and z, or one per micro-batch and strand.
    """
    sequence: int = 24
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    dropout: float | None = None
    """Instead of the preset's."""
    label_smoothing: float | None = None
    """Instead of the preset's."""
    zero: bool = False
    """Shard the optimizer state over the data axis and a pipeline's replicas (ZeRO-1)."""
    load: Path | None = None
    """Start from these weights (a safetensors file of `cubeloom.models.weights.save_weights`) instead of initial values."""
    patience: float = 120
    """Seconds that a rank waits for another before it ends the job."""
    seed: int = 0
    device: Kind = CPU
    share_gpu: bool = False
    """Start CUDA's MPS, so that up to four ranks that share a GPU run in parallel and not in turns."""
    json: Annotated[bool, tyro.conf.arg(aliases=["-j"])] = False
    """Print one JSON object as the last line."""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def __call__(self) -> int:
        from cubeloom.launch.share_gpu import sharing
        from cubeloom.tools.verify import verify

        experiment = self.experiment()
        with sharing(experiment.grid.world if self.share_gpu else 0, self.device):
            report = verify(experiment, self.device)
        console = Console(stderr=self.json)
        console.print(losses_table(report), bytes_table(report), verdict(report), sep="\n")
        if self.json:
            print(json.dumps(report.as_json()))
        return 0 if report.ok else 1

    def experiment(self) -> Experiment:
        from cubeloom.comm import devices
        from cubeloom.pipeline.runtime.microbatches import portions
        from cubeloom.tools.verify import Experiment

        within("--steps", self.steps)
        duration("--patience", self.patience)
        if not devices.available(self.device):
            raise UserError(f"--device {self.device}: torch sees none here; use --device {CPU}")
        if self.record and self.device == CPU:
            raise UserError("--record: stages are recorded on a GPU only; use --device cuda")
        if self.file is not None:
            return self._of_job(load(Job, self.file, self.overrides))
        grid = Grid.parse(self.grid, tuple(axis.strip() for axis in self.placement.split(",")))
        model, schedule = self._model(), self._schedule(grid)
        within("--ways", self.ways, most=SAMPLES)
        each = lcm(2, self.ways) if schedule is None else self.ways * len(portions(schedule))
        if model.positions is None:
            each *= lcm(grid.x, grid.y)  # images are cut by samples
        batch = Batch(each * grid.data * grid.z if self.batch is None else self.batch, self._sequence(model))
        within("--batch", batch.samples, most=SAMPLES)
        return Experiment(
            model=model,
            grid=grid,
            batch=batch,
            rest=models.sharding_policy(model, self.rest, self.weights, self.inputs, self.gradients, self.precision),
            steps=self.steps,
            dtype=dtypes.as_torch(self.dtype),
            seed=self.seed,
            initial_seed=self.seed,
            zero=self.zero,
            weights=None if self.load is None else str(self.load),
            schedule=schedule,
            ways=self.ways,
            recompute=self.recompute,
            compile=self.compile,
            record=self.record,
            patience=self.patience,
        )

    def _of_job(self, job: Job) -> Experiment:
        """The file's decomposition, with the number of steps and the precision of the command line."""
        for field in fields(self):
            if field.name not in _OUR_OWN and getattr(self, field.name) != field.default:
                raise UserError(f"with a file, --{field.name.replace('_', '-')} is the file's to say: use --a.b=c")
        from cubeloom.tools.verify import Experiment

        found = Experiment.of_job(
            job, steps=self.steps, dtype=dtypes.as_torch(self.dtype), seed=self.seed, patience=self.patience
        )
        # A CPU does not record, and compiling takes longer than the steps.
        on_gpu = self.device != CPU
        return replace(found, compile=job.layout.compile and on_gpu, record=job.layout.record and on_gpu)

    def _sequence(self, model: ModelSource) -> int:
        if model.positions is None:
            return 1
        if not 1 <= self.sequence <= model.positions:
            raise UserError(
                f"--sequence {self.sequence}: {self.model} takes sequences of 1 to {model.positions} tokens"
            )
        return self.sequence

    def _model(self) -> ModelSource:
        if self.model not in PRESETS:
            given = [name for name in (*SIZES, *SHARES) if getattr(self, name) is not None]
            if given:
                raise UserError(f"--{given[0].replace('_', '-')} is for presets: the sizes of {self.model} are its own")
            return named(self.model)
        model = config(self.model)
        for name in SIZES:
            value = getattr(self, name)
            if value is None:
                continue
            words = name.replace("_", "-")
            within(f"--{words}", value, most=of_model(name))
            if not isinstance(model, LanguageConfig) or not hasattr(model, name):
                raise UserError(f"model {self.model} has no {SIZES[name]} to choose")
            model = replace(model, **{name: value})
        for name in SHARES:
            value = getattr(self, name)
            if value is None:
                continue
            if not hasattr(model, name):
                raise UserError(f"model {self.model} has no {name.replace('_', ' ')}")
            share(f"--{name.replace('_', '-')}", value)
            model = replace(model, **{name: value})
        return models.OurModel(model, self.model)

    def _schedule(self, grid: Grid) -> Schedule | None:
        if grid.pipe == 1 and self.schedule is None:
            given = [name for name in ("microbatches", "pairs", "mode") if getattr(self, name) is not None]
            if given:
                raise UserError(f"--{given[0]} is for a pipeline: give --schedule too, or a grid with pipe > 1")
            return None
        count = 2 * grid.pipe if self.microbatches is None else self.microbatches
        made = generate(self.schedule or "1f1b", grid.pipe, count, pairs=self.pairs, mode=self.mode)
        if self.sync is None:
            return overlapped(made)
        return made if self.sync == "end" else synchronised(made, Sync(self.sync))


def losses_table(report: Report) -> Table:
    table = Table("step", "serial loss", f"loss on {report.experiment.grid}", title="Training")
    for step, (theirs, ours) in enumerate(zip(report.serial_losses, report.losses, strict=True)):
        table.add_row(str(step), f"{theirs:.12f}", f"{ours:.12f}")
    return table


def bytes_table(report: Report) -> Table:
    from cubeloom.comm.ledger import plain

    table = Table("axis", "counted", "predicted", title="Bytes that rank 0 received")
    for axis in sorted(report.counted.keys() | report.predicted.keys()):
        table.add_row(
            axis, *(f"{plain(found.get(axis, Fraction(0))):,}" for found in (report.counted, report.predicted))
        )
    return table


def _on_rounding(report: Report) -> str:
    """Describe differences above the tolerance, and how much rounding alone explains."""
    if missing := [what for what, difference in report.differences.items() if difference == inf]:
        return f"NOT A NUMBER, OR MISSING ON ONE SIDE: {', '.join(missing[:5])}\n"
    if not report.rounding:
        return ""
    from cubeloom.tools.verify.report import ROUNDINGS

    over = [what for what, difference in report.differences.items() if difference > report.tolerance]
    what = max(over, key=lambda what: report.differences[what] / report.allowed(what))
    return (
        f"{what}: off by {report.differences[what]:.1e}; two serial runs that begin apart by rounding are by "
        f"{report.rounding.get(what, 0.0):.1e}, and {ROUNDINGS:g} times that is right\n"
    )


def verdict(report: Report) -> str:
    differences = "  ".join(
        f"{name} {size:.1e}"
        for name, size in (("loss", report.loss_diff), ("gradients", report.grad_diff), ("weights", report.weight_diff))
        if name != "gradients" or not report.experiment.asynchronous
    )
    worst = ", ".join(filter(None, (report.largest(kind)[1] for kind in ("gradient", "weight"))))
    agree = "agree on every rank" if report.bytes_agree else "DO NOT AGREE"
    if not report.replicas_agree:
        agree += "; RANKS THAT HOLD THE SAME WEIGHTS HOLD DIFFERENT BITS"
    serial = "the serial model with weights as stale" if report.experiment.asynchronous else "the serial model"
    return (
        f"largest relative difference: {differences}  (at most {report.tolerance:.0e} is right; worst: {worst})\n"
        + _on_rounding(report)
        + f"bytes counted and predicted {agree}; {report.parameters:,} parameters a rank\n"
        + (f"the grid trains as {serial} does" if report.ok else f"THE GRID DOES NOT TRAIN AS {serial.upper()} DOES")
    )
