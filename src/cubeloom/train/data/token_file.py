"""A token folder, mapped into memory."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from cubeloom.base.errors import UserError
from cubeloom.train.data.checked import SUMS, Checked, parts
from cubeloom.train.data.hugging_face import HuggingFace
from cubeloom.train.data.meta import CHECKSUMS, COUNTED, DOCUMENTS, ENDS, MARKS, TOKENS, Meta, token_dtype
from cubeloom.train.data.packing import Packs, with_targets
from cubeloom.train.data.sources import sha256
from cubeloom.train.data.stream import Stream
from cubeloom.train.data.tokenizer import Array, Bytes, Tokenizer
from cubeloom.train.data.tokenizer_files import NAMES, TOKENIZER, read

PartName = Literal["training", "validation"]


def _more(tokens: int, part: PartName) -> str:
    """How to get enough tokens, for an error."""
    shorter = f"set batch.sequence to {tokens - 1} or less" if tokens > 1 else ""
    if part == "training":
        return f"{shorter}, or prepare more text" if shorter else "prepare more text"
    prepare = "prepare it again with a larger share (--validation 0.1 --force), or leave out evaluation.every"
    return f"{shorter}, or {prepare}" if shorter else prepare


class TokenFile:
    """A folder that `cubeloom data prepare` wrote. Data are checked when they are read; `damaged` reads everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = Meta.read(folder)
        self._dtype = token_dtype(self.meta.vocabulary)
        if self._dtype.name != self.meta.dtype:
            raise UserError(f"{folder} is damaged: {self.meta.vocabulary} tokens are not kept as {self.meta.dtype}")
        tokens, documents = self.meta.tokens * self._dtype.itemsize, self.meta.documents * ENDS.itemsize
        marks = self.meta.tokens * MARKS.itemsize if self.meta.counted else 0
        for name, size in (
            (TOKENS, tokens),
            (DOCUMENTS, documents),
            *([(COUNTED, marks)] if self.meta.counted else []),
            (CHECKSUMS, (parts(tokens) + parts(documents) + parts(marks)) * SUMS.itemsize),
        ):
            path = folder / name
            found = path.stat().st_size if path.exists() else 0
            if found != size:
                raise UserError(f"{path} is damaged: it has {found} bytes and should have {size}")
        if sha256(folder / CHECKSUMS)[1] != self.meta.sha256.get(CHECKSUMS):
            raise UserError(f"{folder / CHECKSUMS} is damaged: it is not what was written")
        sums = np.fromfile(folder / CHECKSUMS, SUMS)
        self.tokens = Checked(folder / TOKENS, self._dtype, sums[: parts(tokens)])
        """All tokens, training first."""
        rest = sums[parts(tokens) :]
        self.documents = Checked(folder / DOCUMENTS, ENDS, rest[: parts(documents)])
        """The end of each document in `tokens`, after its end token."""
        self.counted = Checked(folder / COUNTED, MARKS, rest[parts(documents) :]) if self.meta.counted else None
        """For each of `tokens` whether it counts as a target; None if all do."""

    @property
    def training(self) -> Checked:
        return self.tokens.within(*self._bounds("training"))

    @property
    def validation(self) -> Checked:
        return self.tokens.within(*self._bounds("validation"))

    def _bounds(self, part: PartName) -> tuple[int, int]:
        first = self.meta.training.tokens
        return (0, first) if part == "training" else (first, len(self.tokens))

    def document(self, number: int) -> Array:
        """The tokens of a document, with the end token."""
        first, last = self.documents[number - 1 : number + 1] if number else (0, *self.documents[:1])
        return self.tokens[int(first) : int(last)]

    def stream(self, sequence: int, *, seed: int = 0, part: PartName = "training", packing: bool = False) -> Stream:
        """Samples of training, shuffled; or of validation, in order. `packing`: of whole documents."""
        first, last = self._bounds(part)
        if last - first <= (0 if packing else sequence):
            raise UserError(
                f"{self.folder} has {last - first} tokens for {part}: too few for a sequence of {sequence}; "
                + _more(last - first, part)
            )
        packs = Packs.of(self._ends(part), sequence) if packing else None
        counted = None if self.counted is None else self.counted.within(first, last)
        return Stream(
            self.tokens.within(first, last),
            sequence,
            seed,
            shuffled=part == "training",
            tokenizer=self.meta.tokenizer,
            vocabulary=self.meta.vocabulary,
            name=str(self.folder),
            counted=counted,
            packs=packs,
            end=self.meta.end,
            kept=None if counted is None else self._with_targets(counted, packs, sequence, part),
        )

    def _with_targets(self, counted: Checked, packs: Packs | None, sequence: int, part: PartName) -> Array:
        """The samples with a target: one without would cost as much and teach nothing."""
        if packs is None:
            starts = np.arange((len(counted) - 1) // sequence) * sequence
            found = with_targets(starts, starts + sequence + 1, counted, None)
        else:
            found = with_targets(packs.starts, packs.stops, counted, packs.ends)
        if not len(found):
            raise UserError(f"{self.folder} has no answer for {part} in samples of {sequence} tokens")
        return found

    def _ends(self, part: PartName) -> Array:
        """The ends of a part's documents, counted from its start."""
        cut = self.meta.training.documents
        if part == "training":
            return self.documents[:cut].astype(np.int64)
        return self.documents[cut : len(self.documents)].astype(np.int64) - self.meta.training.tokens

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if self.meta.tokenizer == Bytes.fingerprint:
            return Bytes()
        found = HuggingFace(self.folder / TOKENIZER, self.meta.request["tokenizer"].get("end"))
        if found.fingerprint != self.meta.tokenizer:
            raise UserError(f"{self.folder / TOKENIZER} is damaged: it is not what was written")
        return found

    @property
    def tokenizer_texts(self) -> dict[str, str]:
        """The tokenizer's files in the folder, by name, including a chat template."""
        return {name: read(self.folder / name) for name in NAMES if (self.folder / name).is_file()}

    def damaged(self) -> list[str]:
        """The files that have changed since they were written."""
        return [
            name
            for name, digest in self.meta.sha256.items()
            if not (self.folder / name).exists() or sha256(self.folder / name)[1] != digest
        ]
