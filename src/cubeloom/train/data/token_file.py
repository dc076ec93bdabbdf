"""A folder of tokens, mapped into memory."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from cubeloom.base.errors import UserError
from cubeloom.train.data.checked import SUMS, Checked, parts
from cubeloom.train.data.hugging_face import HuggingFace
from cubeloom.train.data.meta import CHECKSUMS, DOCUMENTS, ENDS, TOKENIZER, TOKENS, Meta, token_dtype
from cubeloom.train.data.sources import sha256
from cubeloom.train.data.stream import Stream
from cubeloom.train.data.tokenizer import Array, Bytes, Tokenizer


class TokenFile:
    """What `cubeloom data prepare` wrote. What is read is checked as it is; `damaged` reads everything."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = Meta.read(folder)
        self._dtype = token_dtype(self.meta.vocabulary)
        if self._dtype.name != self.meta.dtype:
            raise UserError(f"{folder} is damaged: {self.meta.vocabulary} tokens are not kept as {self.meta.dtype}")
        tokens, documents = self.meta.tokens * self._dtype.itemsize, self.meta.documents * ENDS.itemsize
        for name, size in (
            (TOKENS, tokens),
            (DOCUMENTS, documents),
            (CHECKSUMS, (parts(tokens) + parts(documents)) * SUMS.itemsize),
        ):
            path = folder / name
            found = path.stat().st_size if path.exists() else 0
            if found != size:
                raise UserError(f"{path} is damaged: it has {found} bytes and should have {size}")
        if sha256(folder / CHECKSUMS)[1] != self.meta.sha256.get(CHECKSUMS):
            raise UserError(f"{folder / CHECKSUMS} is damaged: it is not what was written")
        sums = np.fromfile(folder / CHECKSUMS, SUMS)
        self.tokens = Checked(folder / TOKENS, self._dtype, sums[: parts(tokens)])
        """All of them, training first."""
        self.documents = Checked(folder / DOCUMENTS, ENDS, sums[parts(tokens) :])
        """Where each document ends in `tokens`, its end token included."""

    @property
    def training(self) -> Checked:
        return self.tokens.within(0, self.meta.training.tokens)

    @property
    def validation(self) -> Checked:
        return self.tokens.within(self.meta.training.tokens, len(self.tokens))

    def document(self, number: int) -> Array:
        """The tokens of a document, the end token included."""
        first, last = self.documents[number - 1 : number + 1] if number else (0, *self.documents[:1])
        return self.tokens[int(first) : int(last)]

    def stream(self, sequence: int, *, seed: int = 0, part: Literal["training", "validation"] = "training") -> Stream:
        """Samples of training, shuffled; or of validation, in order."""
        tokens = self.training if part == "training" else self.validation
        if len(tokens) <= sequence:
            raise UserError(f"{self.folder} has {len(tokens)} tokens for {part}: too few for a sequence of {sequence}")
        return Stream(
            tokens,
            sequence,
            seed,
            shuffled=part == "training",
            tokenizer=self.meta.tokenizer,
            vocabulary=self.meta.vocabulary,
            name=str(self.folder),
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if self.meta.tokenizer == Bytes.fingerprint:
            return Bytes()
        found = HuggingFace(self.folder / TOKENIZER, self.meta.request["tokenizer"].get("end"))
        if found.fingerprint != self.meta.tokenizer:
            raise UserError(f"{self.folder / TOKENIZER} is damaged: it is not what was written")
        return found

    def damaged(self) -> list[str]:
        """The files that are not as they were written."""
        return [
            name
            for name, digest in self.meta.sha256.items()
            if not (self.folder / name).exists() or sha256(self.folder / name)[1] != digest
        ]
