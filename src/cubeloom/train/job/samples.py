"""The samples that a job trains on, and those that it is judged on."""

from __future__ import annotations

from typing import Literal

from cubeloom.base.errors import UserError, counted
from cubeloom.models import PRESETS
from cubeloom.train.data import Mixture, Samples, TokenFile
from cubeloom.train.data.random_tokens import RandomTokens
from cubeloom.train.data.stream import Stream
from cubeloom.train.job.job import Job

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


def samples_of(job: Job, part: Part) -> Samples:
    """Raises UserError where a folder is missing or does not fit the model."""
    model, sequence = job.source(), job.batch.sequence
    if model.naming.task != "next token":
        raise UserError(
            f"model.name = {job.model.called!r}: training from tokens is for models that predict the next one; for images see"
            " examples/diffusion.py"
        )
    if model.positions is not None and sequence > model.positions:
        raise UserError(f"batch.sequence = {sequence}, and the model has {model.positions} positions: at most as many")
    if model.vocabulary is None:
        raise UserError(f"model.name = {job.model.called!r}: the model does not say how many tokens it knows")
    seed = job.seed if job.data.seed is None else job.data.seed
    if not job.data.sources:
        # Training and validation must not be the same tokens.
        return RandomTokens(model.vocabulary, sequence, 2 * seed + (part == "validation"))
    streams = []
    for source in job.data.sources:
        tokens = TokenFile(source.folder)
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
        streams.append(tokens.stream(sequence, seed=seed, part=part))
    if len(streams) == 1:
        return streams[0]
    return Mixture(streams, [source.weight for source in job.data.sources])
