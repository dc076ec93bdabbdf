"""The vocabulary size that a model needs for its training data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cubeloom.train.data.meta import META, Meta

if TYPE_CHECKING:
    from cubeloom.train.job.settings import DataSettings, Source


def vocabulary_of(data: DataSettings, more: int = 0) -> int | None:
    """The vocabulary of the sources plus `more` tokens, rounded up as the settings say.

    None if no source is on this machine, for example one that only plans.
    """
    found = [vocabulary for source in data.sources if (vocabulary := _vocabulary(source)) is not None]
    return -(-(max(found, default=0) + more) // data.vocab_multiple) * data.vocab_multiple if found else None


def _vocabulary(source: Source) -> int | None:
    if source.folder is not None:
        return Meta.read(source.folder).vocabulary if (source.folder / META).is_file() else None
    known = source.tokenizer in (None, "bytes") or Path(str(source.tokenizer)).exists()
    if not known:
        return None
    from cubeloom.train.job.streams import tokenizer_of  # reads streams, which needs torch

    return tokenizer_of(source)[0].vocabulary
