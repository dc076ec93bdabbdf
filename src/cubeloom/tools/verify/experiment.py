"""What is trained to compare a grid with the serial model: a model, a grid, a few steps on generated data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from cubeloom.base.divisors import nearest_multiples
from cubeloom.base.errors import UserError
from cubeloom.base.grid import Grid
from cubeloom.base.limits import within
from cubeloom.models import ModelSource, skeleton
from cubeloom.parallel import AnyCut, Batch, ShardingPolicy, resolve
from cubeloom.parallel.recomputed import blocks_of
from cubeloom.parallel.specs import LayerSpec
from cubeloom.pipeline import Schedule, Updates
from cubeloom.pipeline.runtime.build import Recompute, StagePlan, plan_stages, shared_owner
from cubeloom.pipeline.runtime.recorded import check_recordable
from cubeloom.train.job import Job


@dataclass(frozen=True, kw_only=True)
class Experiment:
    model: ModelSource
    grid: Grid
    batch: Batch
    rest: ShardingPolicy = field(default_factory=ShardingPolicy)
    steps: int = 3
    dtype: torch.dtype = torch.float64
    seed: int = 0
    initial_seed: int = 0
    repeat: bool = False  # one batch for all steps, so that the model can learn it
    learning_rate: float = 1e-3
    zero: bool = False  # optimizer state sharded over the data axis
    fp32_master_weights: bool = True  # float32 copies of weights with a lower precision
    moments: Literal["bfloat16"] | None = None  # rounded stochastically
    offload: bool = False  # optimizer state and masters in the host's memory
    weights: str | None = None  # a file to start from, instead of initial values
    schedule: Schedule | None = None  # of the pipeline, if the grid has one
    patience: float = 120  # seconds that a rank waits for another
    ways: int = 1  # strands of a weave
    recompute: Recompute = False  # stages recompute their forward, or attention, in the backward
    record: bool = False  # stages' actions as CUDA graphs
    compile: bool = False  # code between collectives
    nudged: bool = False  # initial values differ by as much as rounding may, to see its effect on a training

    @classmethod
    def of_job(cls, job: Job, *, steps: int, dtype: torch.dtype, seed: int = 0, patience: float = 120) -> Experiment:
        """The decomposition of a job."""
        return cls(
            model=job.source(),
            grid=job.grid,
            batch=job.batch,
            rest=job.rest,
            steps=steps,
            dtype=dtype,
            seed=seed,
            initial_seed=seed,
            zero=job.optimizer.shard_optimizer_state,
            fp32_master_weights=job.optimizer.fp32_master_weights,
            moments=job.optimizer.moments,
            offload=job.optimizer.offload,
            schedule=job.schedule.schedule(job.grid.pipe),
            ways=job.layout.ways,
            recompute=job.layout.recomputation,
            patience=patience,
        )

    def skeleton(self) -> nn.Module:
        """The model without values."""
        return skeleton(self.model)

    def cut(self, model: nn.Module) -> AnyCut:
        return self.model.cut(model)

    def specs(self) -> list[LayerSpec]:
        """The spec of each layer on the grid. Raises UserError if the model cannot be cut."""
        if self.schedule is None:
            if self.record:
                raise UserError("what is recorded are the stages of a pipeline: give a schedule")
            if not isinstance(self.recompute, bool):
                raise UserError("without a schedule all blocks are recomputed, or none")
            return self._strand_specs()
        layout = self.layout(self.schedule)
        layout.check_options(self.recompute)
        specs = list(layout.specs)
        if self.record:
            check_recordable(specs, self.schedule, self.ways, bool(self.recompute))
        if self.asynchronous and self.drops:
            raise UserError(f"{self.schedule.name} can be compared without dropout only: use --dropout 0")
        tied = any(shared_owner(spec) is not None for spec in specs)
        if tied and self.schedule.updates is Updates.NEWEST:
            # Two stages would use two versions of one weight in the same micro-batch; a serial model has only one.
            raise UserError(f"{self.schedule.name} can be compared on a model that ties no weights: use llama-tiny")
        return specs

    def blocks(self, model: nn.Module, specs: Sequence[LayerSpec]) -> tuple[str, ...]:
        """For a model without a pipeline, the modules that are recomputed in the backward."""
        return blocks_of(model, specs) if self.recompute is True else ()

    def layout(self, schedule: Schedule, unchecked: bool = False) -> StagePlan:
        """The layers of each stage. Raises UserError if the model cannot be cut this way. `unchecked`: see `resolve`."""
        model = self.skeleton()
        return plan_stages(
            model,
            self.cut(model),
            self.grid,
            self.batch,
            schedule,
            self.rest,
            ways=self.ways,
            unchecked=unchecked,
        )

    def _strand_specs(self) -> list[LayerSpec]:
        within("ways", self.ways)
        least = self.ways * self.grid.data * self.grid.z
        if self.ways > 1 and self.batch.samples % least:
            raise UserError(
                f"the batch of {self.batch.samples} samples cannot be cut into {self.ways} strands on data={self.grid.data}·"
                f"z={self.grid.z}; it must be a multiple of {least}: {nearest_multiples(self.batch.samples, least)}"
            )
        strand = Batch(self.batch.samples // self.ways, self.batch.sequence)
        model = self.skeleton()
        return resolve(model, self.cut(model), self.grid, self.rest, strand, portions=self.ways)

    @property
    def asynchronous(self) -> bool:
        """Whether the schedule updates weights within a step, so that the serial model must use stale ones as well."""
        return self.schedule is not None and self.schedule.updates is not Updates.FLUSH

    @property
    def drops(self) -> bool:
        return any(isinstance(module, nn.Dropout) and module.p > 0 for module in self.skeleton().modules())

    @property
    def serial(self) -> Experiment:
        """The same on one device. Settings without effect there have their defaults, so that equal runs are recognised."""
        return replace(
            self,
            grid=Grid(),
            # With dropout the serial model is a cube of one device.
            rest=self.rest if self.drops else ShardingPolicy(precision=self.rest.precision),
            zero=False,
            fp32_master_weights=True,
            offload=False,
            schedule=None,
            recompute=False,
            record=False,
            compile=False,
            ways=1,
            patience=120,
        )

    def samples(self, step: int) -> dict[str, Tensor]:
        """The global batch of a step."""
        return self.model.samples(self.batch, self.seed, 0 if self.repeat else step, self.dtype)

    def share(self, step: int, coordinates: dict[str, int]) -> dict[str, Tensor]:
        """The samples of a rank at these coordinates."""
        mine = self.grid.share(coordinates, self.batch.samples)
        return {name: tensor[mine] for name, tensor in self.samples(step).items()}
