"""How many tokens a model needs for the data that it is trained on."""

from __future__ import annotations

from cubeloom.train.data.meta import META, Meta
from cubeloom.train.job.settings import DataSettings


def vocabulary_of(data: DataSettings) -> int | None:
    """That of the sources, rounded up as the settings ask; None where none is here to be asked, as on a machine that plans."""
    folders = [source.folder for source in data.sources if (source.folder / META).is_file()]
    found = [Meta.read(folder).vocabulary for folder in folders]
    return -(-max(found) // data.vocab_multiple) * data.vocab_multiple if found else None
