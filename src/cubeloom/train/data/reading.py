"""Turns a record of JSON lines, Parquet or Arrow into pieces of documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.train.data.conversations import FIELDS, Conversations, Marked, is_conversation

TEXT = "text"


@dataclass(frozen=True)
class Piece:
    """Text of one document, and whether the document ends with it; or a whole conversation."""

    text: str
    ends: bool
    marked: Marked | None = None


@dataclass(frozen=True)
class Reading:
    """`field` has the text, unless a record is a conversation, which `chat` handles."""

    field: str = TEXT
    separator: str | None = None
    """In text files, a line that equals this ends a document."""
    chat: Conversations | None = None

    def columns(self, names: Sequence[str], where: str) -> list[str]:
        """The columns to read from a table with these columns."""
        if self.chat is not None and is_conversation(names):
            return [name for name in names if name in FIELDS]
        if self.field not in names:
            raise UserError(unknown(self.field, names, where))
        return [self.field]

    def pieces(self, record: Mapping[str, Any], where: str) -> list[Piece]:
        if self.chat is not None and is_conversation(list(record)):
            return [Piece(each.text, True, each) for each in self.chat.documents(record, where)]
        if self.field not in record:
            raise UserError(unknown(self.field, list(record), where))
        return [Piece(_string(record[self.field], self.field, where), True)]


def unknown(field: str, fields: Sequence[str], where: str) -> str:
    near = get_close_matches(field, fields, 1)
    hint = f"; did you mean --field {near[0]}?" if near else ""
    return f"{where} has no field {field!r}, but {', '.join(map(repr, fields)) or 'none'}{hint}"


def _string(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: field {field!r} is not text but {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON may contain half of a surrogate pair
        raise UserError(f"{where}: field {field!r} holds half of a character, which UTF-8 cannot") from None
    return value
