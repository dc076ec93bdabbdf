"""Streams named in a settings file."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.train.data.documents import HUB, Documents, Files, hub
from cubeloom.train.data.request import Request
from cubeloom.train.data.streaming import Streaming
from cubeloom.train.data.token_file import PartName
from cubeloom.train.data.tokenizer import Tokenizer
from cubeloom.train.data.tokenizer_files import TEMPLATE
from cubeloom.train.job.settings import Source


def stream_of(
    source: Source, sequence: int, packing: bool, part: PartName, state: dict[str, Any] | None = None
) -> Streaming:
    """Raises UserError if there is nothing to read. `state`: where a run stopped."""
    request = _request(source)
    tokenizer = request.made_tokenizer()
    reading = request.reading(None if source.field is not None else request.own_template, tokenizer)
    assert source.stream is not None
    documents: Documents
    if source.stream.startswith(HUB):
        documents = hub(source.stream.removeprefix(HUB), source.subset, source.split or "train", reading)
    else:
        for name in ("subset", "split"):
            if getattr(source, name) is not None:
                raise UserError(f"data.sources: {name} is for a dataset of the hub, as in stream = '{HUB}NAME'")
        documents = Files(Path(source.stream), reading)
    return Streaming(
        documents,
        tokenizer,
        sequence,
        chat=reading.chat,
        packing=packing,
        validation=Fraction(str(source.validation or 0)),
        part=part,
        state=state,
    )


def tokenizer_of(source: Source) -> tuple[Tokenizer, Mapping[str, str]]:
    """The tokenizer of a stream, and its files, which include the chat template."""
    request = _request(source)
    files = {} if request.tokenizer_files is None else dict(request.tokenizer_files.texts)
    return request.made_tokenizer(), files if source.field is not None else {**files, TEMPLATE: request.own_template}


def _request(source: Source) -> Request:
    if source.tokenizer == "bpe":
        raise UserError(
            "data.sources: tokenizer = 'bpe' is trained on what is prepared; a stream needs one that is there"
        )
    return Request(inputs=(), tokenizer=source.tokenizer or "bytes", field=source.field, template=source.template)
