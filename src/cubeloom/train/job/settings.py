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
from cubeloom.models.configs import Config
from cubeloom.models.named import named
from cubeloom.models.presets import PRESETS, config
from cubeloom.parallel import ShardingPolicy
from cubeloom.parallel.config import Activations, GradientDtype, Inputs, Weights
from cubeloom.pipeline import Schedule, Sync, family, generate, synchronised
from cubeloom.train.job.rates import Decay

if TYPE_CHECKING:
    from cubeloom.models import ModelSource
    from cubeloom.pipeline.runtime.build import Recompute

SHARES = ("dropout", "label_smoothing")  # of a model's numbers, those that are no sizes


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model: a preset, and the sizes in which this one differs; or a Hugging Face folder; or a Python function."""

    name: str | None = None
    """A preset, by default gpt-tiny; a Hugging Face folder, with or without weights; or file.py:function, which is executed."""
    preset: str | None = None
    """The same as `name`."""
    vocab: int | None = None
    """Tokens of the vocabulary; by default the data's, or the preset's where there is no data."""
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
    """The share of activations that is dropped."""
    label_smoothing: float | None = None
    """The share of a target that is spread over all other tokens."""
    tied: bool | None = None
    """Whether embedding and output layer share their weights."""
    start: Path | None = None
    """A checkpoint whose weights to begin with, for instance one that `cubeloom convert` made."""

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
        """Of a preset with its changes; None of any other model, whose sizes are its own."""
        changes = self._changes()
        if self.called in PRESETS:
            return self._changed(config(self.called), changes)
        for name in changes:
            raise UserError(f"model.{name} is for presets: the sizes of {self.called} are its own")
        return None

    def source(self) -> ModelSource:
        found = self.config()
        return named(self.called) if found is None else models.OurModel(found, self.called)

    def _changes(self) -> dict[str, Any]:
        names = [field.name for field in fields(self) if field.name not in ("name", "preset", "start")]
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
    """A folder of tokens that `cubeloom data prepare` made; or a stream, which is read and tokenized as it comes."""

    folder: Path | None = None
    """A folder of tokens that `cubeloom data prepare` wrote, or of images (docs/data.md)."""
    stream: str | None = None
    """A file, a folder with files or of `save_to_disk`, or `hf:NAME`, a dataset of Hugging Face's hub."""
    weight: float = 1.0
    """How often samples of this source are drawn, beside the weights of the others."""
    tokenizer: str | None = None
    """Of a stream: bytes, by default, or a tokenizer of Hugging Face, its file or a folder with it."""
    field: str | None = None
    """Of a stream: the field or column that holds the text, as `data prepare --field`; "text" by default."""
    template: str | None = None
    """Of a stream of conversations: plain, or a file with a chat template, as `data prepare --template`."""
    subset: str | None = None
    """Of a dataset of the hub: which of its subsets; its default one by default."""
    split: str | None = None
    """Of a dataset of the hub: train by default."""
    validation: float | None = None
    """Of a stream: the share of documents that is kept for validation; none by default."""

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
        """The folder of tokens."""
        assert self.folder is not None
        return self.folder


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where samples come from. Their order depends on the seed and the step alone."""

    sources: tuple[Source, ...] = ()
    """Mixed by their weights. Without any, random tokens are drawn, to try a grid out."""
    seed: int | None = None
    """Of the order; the job's by default."""
    packing: bool = False
    """Samples of whole documents, instead of windows that begin anywhere; batches then say where each document begins."""
    vocab_multiple: int = 1
    """A vocabulary that is taken from the data is rounded up to a multiple of this."""

    def __post_init__(self) -> None:
        if len(self.sources) > 1 and any(source.stream is not None for source in self.sources):
            raise UserError("data.sources: a stream does not mix with others; prepare them (cubeloom data prepare)")
        within("data.vocab_multiple", self.vocab_multiple, most=of_model("vocab"))


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """Of the pipeline. On `pipe = 1` its micro-batches are gradient accumulation."""

    name: str = "1f1b"
    """A schedule that `cubeloom schedule` knows, such as 1f1b, interleaved, zb-h1, chimera, chimera-zb or auto."""
    microbatches: int | None = None
    """Twice as many as there are workers by default, and one where there is no pipeline."""
    pairs: int | None = None
    """Of chimera: pairs of pipelines in opposite directions, a divisor of half the stages; 1 by default."""
    mode: Literal["direct", "doubling", "halving"] | None = None
    """Of chimera: how it goes on after its first micro-batches, where there are more than stages."""
    sync: Literal["end", "eager", "eager-opt"] = "end"
    """When the replicas of a stage start to sum their gradients: at the end of the step, or as soon as they can."""

    def schedule(self, workers: int) -> Schedule:
        count = self.microbatches
        if count is None:
            count = 2 * workers if workers > 1 else 1
        family(self.name)  # known on every grid: a job goes on on others
        # A pipeline of one worker is the same under every name.
        name = self.name if workers > 1 else "1f1b"
        made = generate(name, workers, count, pairs=self.pairs, mode=self.mode)
        return made if self.sync == "end" else synchronised(made, Sync(self.sync))


# What the runtime calls them.
RECOMPUTE: dict[str, Recompute] = {"none": False, "selective": "attention", "full": True}


@dataclass(frozen=True, kw_only=True)
class LayoutSettings:
    """How a rank keeps and computes its part."""

    activations: Activations | None = None
    """Activations between layers: cut further along the axis that does not index them, or replicated along it. Sharded by
    default, and replicated for a model whose cut is found."""
    weights: Weights = "freed"
    """Weights along z: sharded, and gathered twice (freed, as FSDP) or once a step (kept); or replicated, as in DDP."""
    inputs: Inputs = "kept"
    """The input of a linear layer, for its weight gradient: kept as gathered, or kept sharded and gathered again."""
    gradients: GradientDtype = "float32"
    """Of weights with fewer digits: accumulated over micro-batches and reduced in float32, or in the model's dtype."""
    ways: int = 1
    """Strands of a micro-batch: while one waits for a collective, another computes."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed once more in the backward: none, those inside attention, or all but what each block was given."""
    compile: bool = False
    """Let torch compile what is computed between collectives. The first steps then take longer."""
    record: bool = False
    """Record what a stage computes and launch it as a whole (CUDA graphs): for a GPU that would wait for Python."""

    def rest(self, source: ModelSource) -> ShardingPolicy:
        """Of this model. Raises UserError for what it cannot have."""
        models.check_options(source, self.ways, self.compile)
        return models.sharding_policy(source, self.activations, self.weights, self.inputs, self.gradients)


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimizer, and what is done with gradients before it."""

    name: Literal["adamw", "sgd"] = "adamw"
    """Torch's fused AdamW, or SGD with momentum."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of adamw: the decay of its means of gradients and of their squares."""
    eps: float = 1e-8
    """Of adamw: added to the denominator."""
    momentum: float = 0.9
    """Of sgd: the share of the last update that is added to the next."""
    weight_decay: float = 0.1
    """Of matrices; vectors, such as biases and norms, never decay."""
    clip: float = 1.0
    """The largest norm of all gradients together; 0 for none."""
    zero: bool = False
    """Shard the optimizer's state over the data axis and a pipeline's replicas (ZeRO-1)."""
    masters: bool = True
    """Update a float32 copy of weights of fewer digits; without, small updates are lost in rounding, and memory is saved."""

    def __post_init__(self) -> None:
        for place, beta in enumerate(self.betas):
            share(f"optimizer.betas[{place}]", beta)
        share("optimizer.momentum", self.momentum)
        if not self.eps > 0:
            raise UserError(f"optimizer.eps must be above 0, got {self.eps}")
        within("optimizer.weight_decay", self.weight_decay, least=0)
        within("optimizer.clip", self.clip, least=0)


@dataclass(frozen=True, kw_only=True)
class RateSettings:
    """The learning rate: a warm-up to the peak, then a shape down to the floor."""

    peak: float = 1e-3
    """The highest rate; `--lr` for short."""
    warmup: int = 0
    """Steps from 0 to the peak."""
    decay: Decay = "cosine"
    """The shape after the warm-up; wsd stays at the peak until the last `cooldown` of the steps."""
    floor: float = 0.0
    """The rate at the last step."""
    cooldown: float = 0.2
    """Of wsd: the share of all steps over which the rate falls."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Checkpoints, from which the same command goes on after any end."""

    every: int = 100
    """Steps between two; the last step is always kept."""
    keep: int = 2
    """So many of the newest."""
    best: bool = True
    """Keep the one with the least loss on validation, too; it is written when it is found."""
    asynchronous: bool = True
    """Written while training goes on."""

    def __post_init__(self) -> None:
        within("checkpoint.every", self.every)
        within("checkpoint.keep", self.keep)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """The loss on validation data."""

    every: int | None = None
    """Steps between two; never by default."""
    batches: int = 4
    """How many batches of the training's size the loss is the mean of."""
    patience: int | None = None
    """End early once so many in a row were no better than the best before."""

    def __post_init__(self) -> None:
        within("evaluation.batches", self.batches)
        for name, count in (("every", self.every), ("patience", self.patience)):
            if count is not None:
                within(f"evaluation.{name}", count)


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """What is done with a step whose loss or gradient cannot be right: it is skipped, and said so."""

    spike: float | None = None
    """Also skip steps whose gradient norm is so many times the median of the last 32."""
    most: int = 10
    """So many skipped in a row end the run."""

    def __post_init__(self) -> None:
        within("guard.most", self.most)
        if self.spike is not None and not self.spike > 1:
            raise UserError(f"guard.spike must be above 1, got {self.spike}")


@dataclass(frozen=True, kw_only=True)
class MetricsSettings:
    """Where metrics go beside metrics.jsonl, which is always written."""

    every: int = 1
    """Steps between two that are sent to TensorBoard or Weights & Biases."""
    tensorboard: bool = False
    """Write them for TensorBoard, into the run's folder."""
    wandb: str | None = None
    """A project of Weights & Biases."""

    def __post_init__(self) -> None:
        within("metrics.every", self.every)
