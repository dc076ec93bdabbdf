"""The sections of a settings file. Each is a frozen value; what a section means is said here, what it does elsewhere.

The text below a field is its documentation: `cubeloom settings`, `train --help` and docs/settings.md print it. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from cubeloom import models
from cubeloom.base.errors import UserError
from cubeloom.base.limits import of_model, share, within
from cubeloom.base.registry import named
from cubeloom.models.configs import Config
from cubeloom.models.named import LOSSES
from cubeloom.models.named import named as model_named
from cubeloom.models.presets import PRESETS, config
from cubeloom.parallel import ShardingPolicy
from cubeloom.parallel.config import Activations, GradientDtype, Inputs, Precision, Weights
from cubeloom.pipeline import Schedule, Sync, family, generate, overlapped, synchronised
from cubeloom.pipeline.schedules import FAMILIES
from cubeloom.train.job.rates import Decay
from cubeloom.train.job.registries import DATA, OPTIMIZERS

if TYPE_CHECKING:
    from cubeloom.models import ModelSource
    from cubeloom.pipeline.runtime.build import Recompute

SHARES = ("dropout", "label_smoothing")  # of a model's numbers, those that are no sizes


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model: a preset, optionally with other sizes; or a Hugging Face folder; or a Python function."""

    name: str | None = None
    """A preset, by default gpt-tiny; a Hugging Face folder, with or without weights; or file.py:function, which is executed."""
    preset: str | None = None
    """The same as `name`."""
    vocab: int | None = None
    """Size of the vocabulary; by default the data's, or the preset's if there is no data."""
    positions: int | None = None
    """The longest sequence."""
    hidden: int | None = None
    """The width of the model."""
    layers: int | None = None
    """Transformer blocks."""
    heads: int | None = None
    """Attention heads; they divide `hidden`."""
    kv_heads: int | None = None
    """Key-value heads of a Llama; they divide `heads`."""
    mlp_hidden: int | None = None
    """The inner width of a Llama's MLP."""
    dropout: float | None = None
    """The dropout probability."""
    label_smoothing: float | None = None
    """The share of each target's probability that is spread over all other tokens."""
    tied: bool | None = None
    """Whether embedding and output layer share their weights."""
    loss: str | None = named(LOSSES)
    """For a model of others: the loss of its output and the targets, instead of its own."""
    start: Path | None = None
    """A checkpoint whose weights to start from, for instance one that `cubeloom convert` wrote."""

    ALIKE: ClassVar = ("name", "preset")

    def __post_init__(self) -> None:
        if None not in (self.name, self.preset) and self.name != self.preset:
            raise UserError(
                f"model.name = {self.name!r} and model.preset = {self.preset!r} say the same: give one of them"
            )

    @property
    def called(self) -> str:
        return self.name or self.preset or "gpt-tiny"

    def config(self) -> Config | None:
        """A preset with its changes; None for any other model, which has its own sizes."""
        changes = self._changes()
        if self.called in PRESETS:
            if self.loss is not None:
                raise UserError(
                    f"model.loss = {self.loss!r} is for models of others: {self.called} computes its own loss"
                )
            return self._changed(config(self.called), changes)
        for name in changes:
            raise UserError(f"model.{name} is for presets: the sizes of {self.called} are its own")
        return None

    def source(self) -> ModelSource:
        found = self.config()
        return model_named(self.called, self.loss) if found is None else models.OurModel(found, self.called)

    def _changes(self) -> dict[str, Any]:
        names = [field.name for field in fields(self) if field.name not in ("name", "preset", "start", "loss")]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def _changed(self, model: Config, changes: dict[str, Any]) -> Config:
        for name, value in changes.items():
            if not hasattr(model, name):
                raise UserError(f"model.{name}: the model {self.called} has no such size")
            if name in SHARES:
                share(f"model.{name}", value)
            elif not isinstance(value, bool):
                within(f"model.{name}", value, most=of_model(name))
        return replace(model, **changes)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A token folder that `cubeloom data prepare` wrote; or a stream, which is read and tokenized during training."""

    folder: Path | None = None
    """A token folder that `cubeloom data prepare` wrote, or a folder of images (docs/data.md)."""
    stream: str | None = None
    """A file, a folder of files or of `save_to_disk`, or `hf:NAME`, a dataset on Hugging Face's hub."""
    weight: float = 1.0
    """How often samples of this source are drawn, relative to the weights of the others."""
    tokenizer: str | None = None
    """For a stream: bytes, the default, or a Hugging Face tokenizer: its file or a folder with it."""
    field: str | None = None
    """For a stream: the field or column with the text, as in `data prepare --field`; "text" by default."""
    template: str | None = None
    """For a stream of conversations: plain, or a file with a chat template, as in `data prepare --template`."""
    subset: str | None = None
    """For a dataset on the hub: its subset; by default its default one."""
    split: str | None = None
    """For a dataset on the hub: its split; by default train."""
    validation: float | None = None
    """For a stream: the share of documents that is kept for validation; none by default."""

    def __post_init__(self) -> None:
        if (self.folder is None) is (self.stream is None):
            raise UserError("each of data.sources has a folder, of tokens, or a stream")
        if self.stream is None:
            for name in ("tokenizer", "field", "template", "subset", "split", "validation"):
                if getattr(self, name) is not None:
                    raise UserError(f"data.sources: {name} is for a stream; {self.folder} is a folder of tokens")
        if self.validation is not None:
            share("data.sources: validation", self.validation)

    @property
    def tokens(self) -> Path:
        """The token folder."""
        assert self.folder is not None
        return self.folder


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where samples come from. Their order depends only on the seed and the step."""

    name: str | None = named(DATA)
    """How samples are made of the sources; by default as the model needs them, and random without any source."""
    sources: tuple[Source, ...] = ()
    """The sources, mixed by their weights. Without any, random tokens are drawn, to try a grid."""
    seed: int | None = None
    """The seed of the order; by default the job's."""
    packing: bool = False
    """Samples of whole documents, instead of windows that can begin anywhere; batches then say where each document
    begins.
    """
    vocab_multiple: int = 1
    """A vocabulary size taken from the data is rounded up to a multiple of this."""

    def __post_init__(self) -> None:
        if len(self.sources) > 1 and any(source.stream is not None for source in self.sources):
            raise UserError("data.sources: a stream does not mix with others; prepare them (cubeloom data prepare)")
        within("data.vocab_multiple", self.vocab_multiple, most=of_model("vocab"))


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """The pipeline schedule. With `pipe = 1` its micro-batches are gradient accumulation."""

    name: str = named(FAMILIES, "1f1b")
    """A schedule of `cubeloom schedule`."""
    microbatches: int | None = None
    """Number of micro-batches; by default two per worker, and one without a pipeline."""
    pairs: int | None = None
    """For chimera: pairs of pipelines in opposite directions, a divisor of half the stages; 1 by default."""
    mode: Literal["direct", "doubling", "halving"] | None = None
    """For chimera: how it continues if there are more micro-batches than stages."""
    sync: Literal["end", "eager", "eager-opt"] | None = None
    """When gradients are reduced: at the end of the step, behind the last backward (eager), or there if a bubble follows
    (eager-opt). Eager by default, if the schedule updates weights at the end of a step."""

    def schedule(self, workers: int) -> Schedule:
        count = self.microbatches
        if count is None:
            count = 2 * workers if workers > 1 else 1
        family(self.name)  # checked on every grid, because a job may be resumed on another
        # A pipeline of one worker is the same under every name.
        name = self.name if workers > 1 else "1f1b"
        made = generate(name, workers, count, pairs=self.pairs, mode=self.mode)
        if self.sync is None:
            return overlapped(made)
        return made if self.sync == "end" else synchronised(made, Sync(self.sync))


# The runtime's names of these choices.
RECOMPUTE: dict[str, Recompute] = {"none": False, "selective": "attention", "full": True}


@dataclass(frozen=True, kw_only=True)
class LayoutSettings:
    """How a rank stores and computes its part."""

    activations: Activations | None = None
    """Activations between layers: cut further along the axis that does not index them, or replicated along it. Sharded
    by default; replicated for a model whose cut is found automatically.
    """
    weights: Weights = "freed"
    """Weights along z: sharded and gathered twice per step (freed, as FSDP) or once (kept); or replicated, as in DDP.
    """
    inputs: Inputs = "kept"
    """The input of a linear layer for its weight gradient: the gathered copy is kept, or only the shard, gathered
    again.
    """
    gradients: GradientDtype = "float32"
    """Gradients of weights with a lower precision than float32: accumulated and reduced in float32, or in the model's
    dtype.
    """
    ways: int = 1
    """Strands of a micro-batch: while one waits for a collective, another computes."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are recomputed in the backward: none, those inside attention, or all but the inputs of each
    block.
    """
    recompute_budget: int | None = None
    """For selective: all blocks are recomputed, except layer results of this many bytes on a rank, those that take the
    longest to compute per byte. Without it, attention alone is recomputed.
    """
    precision: Precision = "model"
    """Operands of the linears of blocks: in the model's dtype, or rounded to FP8 before they are gathered and multiplied
    (docs/fp8.md).
    """
    compile: bool = False
    """Let torch compile the code between collectives. The first steps then take longer."""
    record: bool = False
    """Record the actions of a stage as CUDA graphs and launch each as a whole: for a GPU that would wait for Python."""

    def __post_init__(self) -> None:
        if self.recompute_budget is not None:
            within("layout.recompute_budget", self.recompute_budget, least=0)
            if self.recompute != "selective":
                raise UserError('layout.recompute_budget is for layout.recompute = "selective"')

    @property
    def recomputation(self) -> Recompute:
        """As the runtime has it."""
        if self.recompute_budget is None:
            return RECOMPUTE[self.recompute]
        from cubeloom.parallel.specs import Budget

        return Budget(self.recompute_budget)

    def rest(self, source: ModelSource) -> ShardingPolicy:
        """The policy for this model. Raises UserError if the model does not support it."""
        return models.sharding_policy(
            source, self.activations, self.weights, self.inputs, self.gradients, self.precision
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimizer, and what is done with gradients before it."""

    name: str = named(OPTIMIZERS, "adamw")
    """Torch's fused AdamW, SGD with momentum, or your own function, which is executed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """For adamw: the decay of its running means of gradients and of their squares."""
    eps: float = 1e-8
    """For adamw: added to the denominator."""
    momentum: float = 0.9
    """For sgd: the momentum."""
    weight_decay: float = 0.1
    """The weight decay of matrices; vectors, such as biases and norms, have none."""
    clip: float = 1.0
    """Gradients are scaled so that their norm is at most this; 0 turns clipping off."""
    shard_optimizer_state: bool = False
    """Shard the optimizer state over the data axis and a pipeline's replicas (ZeRO-1)."""
    fp32_master_weights: bool = True
    """Keep float32 master weights if weights have a lower precision; without them small updates are rounded away, but
    memory is saved.
    """
    moments: Literal["bfloat16"] | None = None
    """For adamw: keep both moments in bfloat16, rounded stochastically; without master weights, weights of bfloat16 are
    rounded so as well. By default moments have the dtype of the weights that are updated.
    """
    offload: bool = False
    """Keep the optimizer's state and master weights in the host's memory, and bring them to the device part by part while
    weights are updated.
    """

    def __post_init__(self) -> None:
        for place, beta in enumerate(self.betas):
            share(f"optimizer.betas[{place}]", beta)
        share("optimizer.momentum", self.momentum)
        if not self.eps > 0:
            raise UserError(f"optimizer.eps must be above 0, got {self.eps}")
        within("optimizer.weight_decay", self.weight_decay, least=0)
        within("optimizer.clip", self.clip, least=0)
        if self.moments is not None and self.name != "adamw":
            raise UserError(
                f'optimizer.moments = "{self.moments}" is for optimizer.name = "adamw"; {self.name} has none: leave it out'
            )


@dataclass(frozen=True, kw_only=True)
class RateSettings:
    """The learning rate: a warm-up to the peak, then a shape down to the floor."""

    peak: float = 1e-3
    """The highest learning rate; `--lr` for short."""
    warmup: int = 0
    """Steps of the warm-up from 0 to the peak."""
    decay: Decay = "cosine"
    """The shape after the warm-up; wsd stays at the peak until the last `cooldown` of the steps."""
    floor: float = 0.0
    """The learning rate at the last step."""
    cooldown: float = 0.2
    """For wsd: the share of all steps over which the rate falls."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Checkpoints. The same command resumes from the newest."""

    every: int = 100
    """Steps between two checkpoints; the last step always gets one."""
    keep: int = 2
    """The number of newest checkpoints to keep."""
    best: bool = True
    """Also keep the checkpoint with the lowest validation loss; it is written when it is found."""
    asynchronous: bool = True
    """Write checkpoints in a thread while training continues."""

    def __post_init__(self) -> None:
        within("checkpoint.every", self.every)
        within("checkpoint.keep", self.keep)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """The loss on validation data."""

    every: int | None = None
    """Steps between two evaluations; never by default."""
    batches: int = 4
    """The number of training-sized batches that an evaluation averages over."""
    patience: int | None = None
    """Stop after this many evaluations in a row that were no better than the best."""

    def __post_init__(self) -> None:
        within("evaluation.batches", self.batches)
        for name, count in (("every", self.every), ("patience", self.patience)):
            if count is not None:
                within(f"evaluation.{name}", count)


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """Steps with an implausible loss or gradient are skipped, and reported."""

    spike: float | None = None
    """Also skip steps whose gradient norm is this many times the median of the last 32."""
    max_consecutive_skips: int = 10
    """This many skips in a row end the run."""

    def __post_init__(self) -> None:
        within("guard.max_consecutive_skips", self.max_consecutive_skips)
        if self.spike is not None and not self.spike > 1:
            raise UserError(f"guard.spike must be above 1, got {self.spike}")


@dataclass(frozen=True, kw_only=True)
class MetricsSettings:
    """Where metrics go besides metrics.jsonl, which is always written."""

    every: int = 1
    """Steps between two records for TensorBoard or Weights & Biases."""
    tensorboard: bool = False
    """Write TensorBoard files into the run's folder."""
    wandb: str | None = None
    """The Weights & Biases project to write to."""

    def __post_init__(self) -> None:
        within("metrics.every", self.every)
