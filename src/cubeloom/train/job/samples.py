"""The samples for a job's training and validation."""

from __future__ import annotations

from typing import Any, Literal

import torch

from cubeloom.base.errors import UserError, counted
from cubeloom.models import PRESETS
from cubeloom.train.data import Mixture, Samples, TokenFile
from cubeloom.train.data.random_tokens import RandomTokens
from cubeloom.train.data.stream import Stream
from cubeloom.train.data.streaming import ValidationStream
from cubeloom.train.job.images import Images, file_of
from cubeloom.train.job.job import Job
from cubeloom.train.job.masked import MaskedTokens
from cubeloom.train.job.random_samples import RandomSamples
from cubeloom.train.job.registries import DATA
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
    name = job.data.name or (_suitable(job) if job.data.sources else "random")
    make = DATA.find(name)
    return make(job, part) if stream is None else make(job, part, stream)


def check_samples(job: Job) -> None:
    """Check that a source of data that the settings name gives what the model's forward takes."""
    if job.data.name is None:
        return
    made, naming = samples_of(job, "training"), job.source().naming
    found = made.batch(torch.arange(2))
    missing = [ours for ours, _ in naming.names if ours not in found]
    if not getattr(made, "as_forward", False) and (missing or naming.data is None):
        wanted = (
            ", ".join(ours for ours, _ in naming.names)
            or "other names: set as_forward = True where they are the forward's"
        )
        raise UserError(
            f"data.name = {job.data.name!r} gives {', '.join(found)}, and the model {job.model.called!r} takes {wanted}"
        )


def _suitable(job: Job) -> str:
    name = job.source().naming.data
    if name is None:
        raise UserError(
            f"model.name = {job.model.called!r}: no source of data gives what this model's forward takes; leave out"
            f" data.sources to try it on random samples, or set data.name to one of {', '.join(DATA.choices)}"
        )
    return name


def _seed(job: Job) -> int:
    return job.seed if job.data.seed is None else job.data.seed


def _check_length(job: Job) -> None:
    most, sequence = job.source().positions, job.batch.sequence
    if most is not None and sequence > most:
        raise UserError(f"batch.sequence = {sequence}, and the model has {most} positions: at most as many")


def _check_sources(job: Job, streams: bool = False) -> None:
    if not job.data.sources:
        raise UserError(f"data.name = {job.data.name!r} needs data.sources")
    if job.data.sources[0].stream is not None and not streams:
        raise UserError(
            f"data.sources: a stream is for models that predict the next token, and not for {job.model.called!r}"
        )


def random(job: Job, part: Part) -> Samples:
    """To try a model or a grid. Training and validation must not be the same samples."""
    source, seed = job.source(), 2 * _seed(job) + (part == "validation")
    if source.naming.data != "tokens":
        return RandomSamples(source, job.batch, seed, job.numbers)
    _check_length(job)
    return RandomTokens(_vocabulary(job), job.batch.sequence, seed)


def _vocabulary(job: Job) -> int:
    found = job.source().vocabulary
    if found is None:
        raise UserError(f"model.name = {job.model.called!r}: the model does not say how many tokens it knows")
    return found


def tokens(job: Job, part: Part, state: dict[str, Any] | None = None) -> Samples:
    """Tokens and those that follow them. `state`: where a stream stopped."""
    _check_sources(job, streams=True)
    if job.data.sources[0].stream is not None:
        return _streamed(job, job.data.sources[0], part, state)
    _check_length(job)
    vocabulary, sequence, seed = _vocabulary(job), job.batch.sequence, _seed(job)
    streams = []
    for source in job.data.sources:
        found = TokenFile(source.tokens)
        if found.meta.vocabulary > vocabulary:
            advice = (
                f"set model.vocab to {found.meta.vocabulary} or a little more that divides well"
                if job.model.called in PRESETS
                else "prepare the data with the tokenizer that the model was made for"
            )
            raise UserError(
                f"{source.folder} has a vocabulary of {found.meta.vocabulary}, and the model one of {vocabulary}: {advice}"
            )
        streams.append(found.stream(sequence, seed=seed, part=part, packing=job.data.packing))
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
    return made if part == "training" else ValidationStream(made)


def masked_tokens(job: Job, part: Part) -> Samples:
    """The last token of the model's vocabulary is the mask: no text contains it."""
    _check_sources(job)
    plain, vocabulary = tokens(job, part), _vocabulary(job)
    most = max(TokenFile(source.tokens).meta.vocabulary for source in job.data.sources)
    if most >= vocabulary:
        raise UserError(
            f"model.name = {job.model.called!r}: its vocabulary of {vocabulary} has no token left that hides others, as the"
            f" data has {most}: set model.vocab to {most + 1} or more"
        )
    return MaskedTokens(plain, most, vocabulary - 1, 2 * _seed(job) + (part == "validation"))


def images(job: Job, part: Part) -> Samples:
    """With their classes, or for a model that removes noise with noise and times."""
    _check_sources(job)
    if len(job.data.sources) > 1:
        raise UserError(f"data.sources has {len(job.data.sources)} folders, and images are taken from one")
    source = job.source()
    steps = getattr(getattr(source, "config", None), "steps", 1000) if source.naming.data == "noised-images" else None
    file = file_of(job.data.sources[0].tokens, part)
    return Images(file, job.numbers, 2 * _seed(job) + (part == "validation"), steps, shuffled=part == "training")
