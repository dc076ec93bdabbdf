"""The samples that a job trains on, and those that it is judged on."""

from __future__ import annotations

from typing import Any, Literal

from cubeloom.base.errors import UserError, counted
from cubeloom.models import GPTConfig, LlamaConfig, OurModel
from cubeloom.train.data import Mixture, Samples, TokenFile
from cubeloom.train.data.random_tokens import RandomTokens
from cubeloom.train.data.stream import Stream
from cubeloom.train.data.streaming import Held
from cubeloom.train.job.job import Job
from cubeloom.train.job.settings import Source
from cubeloom.train.job.streams import stream_of, tokenizer_of

Part = Literal["training", "validation"]


def check_validation(job: Job) -> None:
    """That validation has as many samples as are asked for: the first would be counted again in silence."""
    samples, wanted = samples_of(job, "validation"), job.evaluation.batches * job.batch.samples
    streams = (
        [samples] if isinstance(samples, Stream) else list(samples.streams) if isinstance(samples, Mixture) else []
    )
    needed = samples.needed(wanted) if isinstance(samples, Mixture) else [wanted]
    for stream, need in zip(streams, needed, strict=False):
        if need > stream.windows:
            fit = wanted * stream.windows // need // job.batch.samples
            instead = f"evaluation.batches = {fit} would do" if fit else "batch.samples is more than it has"
            raise UserError(
                f"evaluation.batches = {job.evaluation.batches} needs {counted(need, 'sample')} of {stream.name}, which has "
                f"{counted(stream.windows, 'sample')} of {stream.sequence} tokens for validation: {instead}; or prepare it "
                "with a larger --validation"
            )


def samples_of(job: Job, part: Part, stream: dict[str, Any] | None = None) -> Samples:
    """Raises UserError where a folder is missing or does not fit the model. `stream` is where one was left."""
    model, sequence = job.source(), job.batch.sequence
    if not isinstance(model, OurModel) or not isinstance(model.config, GPTConfig | LlamaConfig):
        raise UserError(
            f"model.preset = {job.model.preset!r}: training from tokens is for models that predict the next one, gpt and "
            "llama; for images see examples/diffusion.py"
        )
    if model.positions is not None and sequence > model.positions:
        raise UserError(f"batch.sequence = {sequence}, and the model has {model.positions} positions: at most as many")
    assert model.vocabulary is not None
    seed = job.seed if job.data.seed is None else job.data.seed
    if not job.data.sources:
        # Training and validation must not be the same tokens.
        return RandomTokens(model.vocabulary, sequence, 2 * seed + (part == "validation"))
    if job.data.sources[0].stream is not None:
        return _streamed(job, job.data.sources[0], part, stream)
    streams = []
    for source in job.data.sources:
        tokens = TokenFile(source.tokens)
        if tokens.meta.vocabulary > model.vocabulary:
            raise UserError(
                f"{source.folder} has a vocabulary of {tokens.meta.vocabulary}, and the model one of {model.vocabulary}: "
                f"set model.vocab to {tokens.meta.vocabulary} or a little more that divides well"
            )
        streams.append(tokens.stream(sequence, seed=seed, part=part, packing=job.data.packing))
    if len(streams) == 1:
        return streams[0]
    return Mixture(streams, [source.weight for source in job.data.sources])


def _streamed(job: Job, source: Source, part: Part, state: dict[str, Any] | None) -> Samples:
    if part == "validation" and not source.validation:
        raise UserError(
            f"data.sources: {source.stream} has no documents for validation; validation = 0.01 keeps a hundredth of them"
        )
    vocabulary, needed = job.source().vocabulary, tokenizer_of(source)[0].vocabulary
    if vocabulary is not None and needed > vocabulary:
        raise UserError(f"{source.stream} has a vocabulary of {needed}, and the model one of {vocabulary}")
    made = stream_of(source, job.batch.sequence, job.data.packing, part, state)
    return made if part == "training" else Held(made)
