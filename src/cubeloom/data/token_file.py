"""A folder of tokens, mapped into memory."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from cubeloom.data.hugging_face import HuggingFace
from cubeloom.data.meta import DOCUMENTS, ENDS, TOKENIZER, TOKENS, Meta, token_dtype
from cubeloom.data.sources import sha256
from cubeloom.data.stream import Stream
from cubeloom.data.tokenizer import Array, Bytes, Tokenizer
from cubeloom.errors import UserError


class TokenFile:
    """What `cubeloom data prepare` wrote. Opening checks sizes; `damaged` reads everything and checks hashes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = Meta.read(folder)
        self._dtype = token_dtype(self.meta.vocabulary)
        if self._dtype.name != self.meta.dtype:
            raise UserError(f"{folder} is damaged: {self.meta.vocabulary} tokens are not kept as {self.meta.dtype}")
        for name, size in (
            (TOKENS, self.meta.tokens * self._dtype.itemsize),
            (DOCUMENTS, self.meta.documents * ENDS.itemsize),
        ):
            path = folder / name
            found = path.stat().st_size if path.exists() else 0
            if found != size:
                raise UserError(f"{path} is damaged: it has {found} bytes and should have {size}")

    @cached_property
    def tokens(self) -> Array:
        """All of them, training first."""
        return np.memmap(self.folder / TOKENS, self._dtype, mode="r")

    @cached_property
    def documents(self) -> Array:
        """Where each document ends in `tokens`, its end token included."""
        return np.memmap(self.folder / DOCUMENTS, ENDS, mode="r")

    @property
    def training(self) -> Array:
        return self.tokens[: self.meta.training.tokens]

    @property
    def validation(self) -> Array:
        return self.tokens[self.meta.training.tokens :]

    def document(self, number: int) -> Array:
        """The tokens of a document, the end token included."""
        first = int(self.documents[number - 1]) if number else 0
        return self.tokens[first : int(self.documents[number])]

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
        return HuggingFace(self.folder / TOKENIZER, self.meta.request["tokenizer"].get("end"))

    def damaged(self) -> list[str]:
        """The files that are not as they were written."""
        return [
            name
            for name, digest in self.meta.sha256.items()
            if not (self.folder / name).exists() or sha256(self.folder / name)[1] != digest
        ]
