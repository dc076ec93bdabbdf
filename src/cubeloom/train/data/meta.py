"""The contents of `meta.json` in a token folder."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cubeloom.base.errors import UserError
from cubeloom.base.files import check_sealed, is_plain_name, read_json, write_sealed

FORMAT, VERSION = "cubeloom tokens", 2
META, TOKENS, DOCUMENTS, COUNTED = "meta.json", "tokens.bin", "documents.bin", "counted.bin"
CHECKSUMS = "checksums.bin"
"""Checksums of the parts of tokens.bin, then of documents.bin, then of counted.bin."""
ENDS = np.dtype("<u8")
"""The ends of documents."""
MARKS = np.dtype("u1")
"""Whether a token counts as a target: 1 or 0."""


@dataclass(frozen=True)
class Part:
    """Training or validation: whole documents, each with its end token."""

    tokens: int
    documents: int


@dataclass(frozen=True, kw_only=True)
class Meta:
    """Training comes first in the files, then validation. Everything but `request` can be checked against the files."""

    vocabulary: int
    end: int
    dtype: str
    training: Part
    validation: Part
    tokenizer: str
    """The fingerprint of the tokenizer."""
    sha256: dict[str, str]
    """The hash of each other file."""
    request: dict[str, Any]
    """The request: the sources with their hashes, and the options. The same request gives the same folder."""
    counted: bool = False
    """Whether only some tokens count as targets, which counted.bin marks."""

    @property
    def tokens(self) -> int:
        return self.training.tokens + self.validation.tokens

    @property
    def documents(self) -> int:
        return self.training.documents + self.validation.documents

    def write(self, folder: Path) -> None:
        write_sealed(folder / META, {"format": FORMAT, "version": VERSION, **asdict(self)})

    @classmethod
    def read(cls, folder: Path) -> Meta:
        file = folder / META
        try:
            known = read_json(file)
        except FileNotFoundError as error:
            what = f"it has no {META}" if folder.is_dir() else f"{META} cannot be read ({error.strerror})"
            raise UserError(
                f"{folder} is not a folder of tokens: {what}; `cubeloom data prepare TEXT... -o {folder}` writes one"
            ) from None
        if known.get("format") != FORMAT:
            raise UserError(f"{folder} is not a folder of tokens: {META} is of another program")
        if (version := known.get("version")) != VERSION:
            raise UserError(
                f"{folder} is of version {version} of the format, and this program reads version {VERSION}; prepare it "
                "again (cubeloom data prepare)"
            )
        check_sealed(file, known)
        del known["format"], known["version"]
        try:
            training, validation = Part(**known.pop("training")), Part(**known.pop("validation"))
            found = cls(training=training, validation=validation, **known)
            found.check()
        except (AttributeError, KeyError, TypeError):
            raise UserError(f"{file} is damaged: it lacks something, or has too much") from None
        return found

    def check(self) -> None:
        """Raises TypeError if a value has the wrong type, as in a file of another program."""
        numbers = [self.vocabulary, self.end, *asdict(self.training).values(), *asdict(self.validation).values()]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise TypeError("a count")
        if not self.end < self.vocabulary:
            raise TypeError("the token that ends a document")
        if type(self.counted) is not bool:
            raise TypeError("whether tokens are marked")
        if not isinstance(self.sha256, dict) or not all(map(is_plain_name, self.sha256)):
            raise TypeError("the hashes of files")
        if not isinstance(self.request["tokenizer"], dict) or not isinstance(self.request["tokenizer"]["kind"], str):
            raise TypeError("the tokenizer")


def token_dtype(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")
