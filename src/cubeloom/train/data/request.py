"""The request to `prepare`: checked, and as JSON, which is equal for equal requests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.base.limits import SIZE, within
from cubeloom.train.data import hugging_face
from cubeloom.train.data.chat_template import PLAIN, Template
from cubeloom.train.data.chunks import fields
from cubeloom.train.data.conversations import Conversations, is_conversation
from cubeloom.train.data.reading import TEXT, Reading
from cubeloom.train.data.sources import Source
from cubeloom.train.data.tokenizer import END, Bytes, Tokenizer
from cubeloom.train.data.tokenizer_files import TOKENIZER, TokenizerFiles, read

DEFAULT_VOCABULARY = 16384
PLAIN_NAME = "plain"


@dataclass(frozen=True, kw_only=True)
class Request:
    inputs: tuple[Path, ...]
    tokenizer: str = "bytes"
    """`bytes`, `bpe`, or the path of a tokenizer file, or of a folder with one."""
    vocabulary: int | None = None
    """For bpe; the result is smaller if the text does not suffice."""
    end: str | None = None
    """The token that ends a document; by default what the tokenizer's folder says, or a token with a usual name."""
    field: str | None = None
    """For JSON lines, Parquet and Arrow. `text` by default; then conversations are recognised by their fields."""
    template: str | None = None
    """For conversations: `plain`, or a file with a chat template; by default the tokenizer folder's, otherwise plain.
    """
    separator: str | None = None
    """In text, a line that ends a document; without it a file is a document."""
    validation: float = 0.01
    """Share of documents."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise UserError(f"--validation must be at least 0 and below 1, got {self.validation}")
        if self.separator is not None and "\n" in self.separator:
            raise UserError("--separator is one line")
        if self.vocabulary is not None and self.tokenizer != "bpe":
            raise UserError(f"--vocab is for --tokenizer bpe; that of {self.tokenizer} is fixed")
        if self.end is not None and self.tokenizer in ("bytes", "bpe"):
            raise UserError(f"--end is for a tokenizer file; that of {self.tokenizer} is fixed")
        if self.vocabulary is not None:  # 256 bytes and the end token are in every vocabulary
            within("--vocab", self.vocabulary, hugging_face.SMALLEST, SIZE)
        if self.tokenizer != "bytes":
            hugging_face.require()

    @property
    def share(self) -> Fraction:
        """The share of validation as it is written: 0.1 is exactly a tenth."""
        return Fraction(str(self.validation))

    @cached_property
    def tokenizer_files(self) -> TokenizerFiles | None:
        """None for a tokenizer that we create."""
        return None if self.tokenizer in ("bytes", "bpe") else TokenizerFiles.read(Path(self.tokenizer))

    @property
    def ends(self) -> str | None:
        """The token that ends a document, if it is given."""
        return self.end or (None if self.tokenizer_files is None else self.tokenizer_files.end)

    def chat_template(self, sources: Sequence[Source]) -> str | None:
        """None if no source has conversations."""
        chats = self.field is None and any(is_conversation(fields(source)) for source in sources)
        if self.template is not None and not chats:
            raise UserError("--template is for conversations, and no input begins with one")
        return self.own_template if chats else None

    @property
    def own_template(self) -> str:
        """The template for conversations, if there are any."""
        if self.template not in (None, PLAIN_NAME):
            return read(Path(self.template))
        own = None if self.tokenizer_files is None or self.template is not None else self.tokenizer_files.template
        return own or PLAIN

    def made_tokenizer(self) -> Tokenizer:
        """The byte tokenizer, or the user's own file, which errors then name; not one that must be trained first."""
        if self.tokenizer_files is None:
            return Bytes()
        return hugging_face.HuggingFace(self.tokenizer_files.where, self.ends)

    def reading(self, template: str | None, tokenizer: Tokenizer | None) -> Reading:
        """`tokenizer`: None while it is being trained. Then special tokens are read as text."""
        chat = None
        if template is not None:
            end = END if tokenizer is None else tokenizer.end_text
            specials = {} if self.tokenizer_files is None else self.tokenizer_files.special_names
            where = "the chat template" if self.template in (None, PLAIN_NAME) else str(self.template)
            made = Template(template, {"bos_token": "", **specials, "eos_token": end}, where)
            chat = Conversations(made, [] if tokenizer is None else list(tokenizer.specials), end)
        return Reading(self.field or TEXT, self.separator, chat)

    def as_json(self, sources: list[Source], template: str | None = None) -> dict[str, Any]:
        chat = {} if template is None else {"template": hashlib.sha256(template.encode()).hexdigest()}
        return {
            "tokenizer": self._tokenizer(),
            "field": self.field or TEXT,
            "separator": self.separator,
            "validation": str(self.share),
            "sources": [source.as_json() for source in sources],
            **chat,
        }

    def _tokenizer(self) -> dict[str, Any]:
        if self.tokenizer == "bytes":
            return {"kind": "bytes"}
        if self.tokenizer == "bpe":
            return {"kind": "bpe", "vocabulary": self.vocabulary or DEFAULT_VOCABULARY}
        assert self.tokenizer_files is not None
        text = self.tokenizer_files.texts[TOKENIZER]
        return {"kind": "file", "sha256": hashlib.sha256(text.encode()).hexdigest(), "end": self.ends}
