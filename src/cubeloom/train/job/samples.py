"""The samples for a job's training and validation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from cubeloom.base.errors import UserError, counted
from cubeloom.models import PRESETS
from cubeloom.train.data import Mixture, Samples, TokenFile
from cubeloom.train.data.random_tokens import RandomTokens
from cubeloom.train.data.stream import Stream
from cubeloom.train.data.streaming import Held
from cubeloom.train.job.images import Images, file_of
from cubeloom.train.job.job import Job
from cubeloom.train.job.masked import MaskedTokens
from cubeloom.train.job.random_samples import RandomSamples
from cubeloom.train.job.settings import Source
from cubeloom.train.job.streams import stream_of, tokenizer_of

Part = Literal["training", "validation"]


def check_validation(job: Job) -> None:
    """Check that validation has as many samples as requested: otherwise the first would silently count twice."""
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
    """Raises UserError if a folder is missing or does not fit the model. `stream`: the state of a stream to resume."""
    given = job.given_samples(part)
    if given is not None:
        return given
    task = job.source().naming.task
    if not job.data.sources and task != "next token":
        # Training and validation must not be the same samples.
        return RandomSamples(job.source(), job.batch, 2 * _seed(job) + (part == "validation"), job.numbers)
    if task not in SOURCES:
        raise UserError(
            f"model.name = {job.model.called!r}: no source of data gives what this model's forward takes; leave out"
            f" data.sources to try it on random samples. Sources there are for: {', '.join(SOURCES)}"
        )
    if job.data.sources and job.data.sources[0].stream is not None:
        if task != "next token":
            raise UserError(
                f"data.sources: a stream is for models that predict the next token, and not for {job.model.called!r}"
            )
        return _streamed(job, job.data.sources[0], part, stream)
    return SOURCES[task](job, part)


def _seed(job: Job) -> int:
    return job.seed if job.data.seed is None else job.data.seed


def _check_length(job: Job) -> None:
    most, sequence = job.source().positions, job.batch.sequence
    if most is not None and sequence > most:
        raise UserError(f"batch.sequence = {sequence}, and the model has {most} positions: at most as many")


def _tokens(job: Job, part: Part) -> Samples:
    model, sequence = job.source(), job.batch.sequence
    _check_length(job)
    if model.vocabulary is None:
        raise UserError(f"model.name = {job.model.called!r}: the model does not say how many tokens it knows")
    seed = _seed(job)
    if not job.data.sources:
        # Training and validation must not be the same tokens.
        return RandomTokens(model.vocabulary, sequence, 2 * seed + (part == "validation"))
    streams = []
    for source in job.data.sources:
        tokens = TokenFile(source.tokens)
        if tokens.meta.vocabulary > model.vocabulary:
            advice = (
                f"set model.vocab to {tokens.meta.vocabulary} or a little more that divides well"
                if job.model.called in PRESETS
                else "prepare the data with the tokenizer that the model was made for"
            )
            raise UserError(
                f"{source.folder} has a vocabulary of {tokens.meta.vocabulary}, and the model one of {model.vocabulary}:"
                f" {advice}"
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
    _check_length(job)
    vocabulary, needed = job.source().vocabulary, tokenizer_of(source)[0].vocabulary
    if vocabulary is not None and needed > vocabulary:
        raise UserError(f"{source.stream} has a vocabulary of {needed}, and the model one of {vocabulary}")
    made = stream_of(source, job.batch.sequence, job.data.packing, part, state)
    return made if part == "training" else Held(made)


def _masked(job: Job, part: Part) -> Samples:
    """The last token of the model's vocabulary is the mask: no text contains it."""
    plain, vocabulary = _tokens(job, part), job.source().vocabulary
    assert vocabulary is not None
    most = max(TokenFile(source.tokens).meta.vocabulary for source in job.data.sources)
    if most >= vocabulary:
        raise UserError(
            f"model.name = {job.model.called!r}: its vocabulary of {vocabulary} has no token left that hides others, as the"
            f" data has {most}: set model.vocab to {most + 1} or more"
        )
    return MaskedTokens(plain, most, vocabulary - 1, 2 * _seed(job) + (part == "validation"))


def _images(job: Job, part: Part) -> Samples:
    if len(job.data.sources) > 1:
        raise UserError(f"data.sources has {len(job.data.sources)} folders, and images are taken from one")
    source = job.source()
    steps = getattr(getattr(source, "config", None), "steps", 1000) if source.naming.task == "denoising" else None
    file = file_of(job.data.sources[0].tokens, part)
    return Images(file, job.numbers, 2 * _seed(job) + (part == "validation"), steps, shuffled=part == "training")


SOURCES: dict[str, Callable[[Job, Part], Samples]] = {
    "next token": _tokens,
    "masked token": _masked,
    "image class": _images,
    "denoising": _images,
}
"""The source of samples for each task."""
