"""Chat and instruction records: the text of a conversation, and which part of it is the assistant's.

The text of an answer is what the template adds to the prompt: the conversation is rendered up to the question, with the
beginning of an answer, and up to the answer; the two differ by that text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cubeloom.base.errors import UserError
from cubeloom.train.data.chat_template import Message, Template
from cubeloom.train.data.tokenizer import Array, Tokenizer

ASSISTANT = "assistant"
LISTS = ("messages", "conversations", "conversation")
PAIRS = (
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("query", "response"),
)
CONTEXTS = ("input", "context")
SYSTEM = "system"
FIELDS = (*LISTS, *dict.fromkeys(name for pair in PAIRS for name in pair), *CONTEXTS, SYSTEM)
_ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "model": ASSISTANT, "bot": ASSISTANT}
# A special token in a message is encoded in these characters, which Unicode reserves for internal use.
_BEGIN, _DIGITS = "\ufdd0", [chr(0xFDD1 + digit) for digit in range(16)]
_LITERAL = re.compile(f"({_BEGIN}[{_DIGITS[0]}-{_DIGITS[-1]}]{{4}})")


@dataclass(frozen=True)
class Marked:
    """A document: `text` as the template rendered it, and `answers`, the ranges of its characters that are answers."""

    text: str
    answers: tuple[tuple[int, int], ...]


def is_conversation(fields: Sequence[str]) -> bool:
    """Whether a record with these fields is a conversation."""
    here = set(fields)
    return bool(here & set(LISTS)) or any(set(pair) <= here for pair in PAIRS)


class Conversations:
    def __init__(self, template: Template, specials: Sequence[str], end: str) -> None:
        """`end`: the special token that ends a document."""
        self._template = template
        self._end = end
        self._specials = sorted(specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, self._specials)) or r"(?!)")

    def documents(self, record: Mapping[str, Any], where: str) -> list[Marked]:
        """Empty for a conversation without an answer; several if the template renders earlier answers differently
        later.
        """
        if isinstance(record.get("prompt"), str) and isinstance(record.get("completion"), str):
            return [self._completed(self._plain(record["prompt"]), self._plain(record["completion"]))]
        messages, counts = _messages(record, where)
        messages = [{**_escaped(each, self._plain), "role": each["role"]} for each in messages]
        try:
            return self._rendered(messages, counts)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

    def encode(self, document: Marked, tokenizer: Tokenizer) -> tuple[Array, Array]:
        """The tokens, and which of them count: those that end within an answer."""
        tokens, ends, done = [], [], 0
        for part in _LITERAL.split(document.text):
            literal = self._written(part)
            found, last = tokenizer.encode_special(part) if literal is None else _as_text(literal, len(part), tokenizer)
            tokens.append(found)
            ends.append(done + last)
            done += len(part)
        last = np.concatenate(ends)
        counted = np.zeros(len(last), bool)
        for start, stop in document.answers:
            counted |= (last > start) & (last <= stop)
        return np.concatenate(tokens), counted

    def _completed(self, prompt: str, completion: str) -> Marked:
        text = prompt + completion + self._end
        return Marked(text, ((len(prompt), len(text)),))

    def _rendered(self, messages: Sequence[Message], counts: Sequence[bool]) -> list[Marked]:
        wanted = [place for place, counted in enumerate(counts) if counted]
        if not wanted:
            return []
        whole = self._template.render(messages)
        found = [self._answer(messages, place) for place in wanted]
        if all(whole.startswith(each.text[: each.answers[0][1]]) for each in found):
            return [Marked(whole, tuple(each.answers[0] for each in found))]
        return found

    def _answer(self, messages: Sequence[Message], place: int) -> Marked:
        """The conversation up to this answer, as a model sees it that is asked for the answer."""
        question, asked = (
            self._template.render(messages[:place], prompt=each) if place else "" for each in (False, True)
        )
        answered = self._template.render(messages[: place + 1])
        start = _common(asked, answered)
        if start < len(question.rstrip()):
            raise UserError(
                "the chat template writes a question otherwise once it is answered; take another with --template"
            )
        return Marked(answered, ((start, max(start, len(answered.rstrip()))),))

    def _plain(self, text: str) -> str:
        """With its special tokens as text."""
        return self._special.sub(lambda found: _code(self._specials.index(found[0])), text)

    def _written(self, part: str) -> str | None:
        """The text that an encoded special token stands for."""
        if not _LITERAL.fullmatch(part):
            return None
        number = int("".join(f"{_DIGITS.index(digit):x}" for digit in part[1:]), 16)
        return self._specials[number] if number < len(self._specials) else part


def _common(one: str, other: str) -> int:
    """The length of the common prefix."""
    differ = (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return next(differ, min(len(one), len(other)))


def _code(number: int) -> str:
    return _BEGIN + "".join(_DIGITS[int(digit, 16)] for digit in f"{number:04x}")


def _as_text(literal: str, length: int, tokenizer: Tokenizer) -> tuple[Array, Array]:
    (found,) = tokenizer.encode([literal])
    return found.astype(np.uint32), np.full(len(found), length, np.int64)


def _escaped(value: Any, escape: Any) -> Any:
    match value:
        case str():
            return escape(value)
        case dict():
            return {name: _escaped(each, escape) for name, each in value.items()}
        case list():
            return [_escaped(each, escape) for each in value]
    return value


def _messages(record: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]], list[bool]]:
    """The messages, and which of them count."""
    name = next((name for name in LISTS if record.get(name) is not None), None)
    if name is not None:
        found = list(_of_list(record[name], f"{where}: {name}"))
        return found, [_is_answer(each) for each in found]
    pair = next((pair for pair in PAIRS if all(record.get(each) is not None for each in pair)), None)
    if pair is None:
        raise UserError(
            f"{where} is no conversation: it has {', '.join(map(repr, record)) or 'no fields'}; one has "
            f"{', '.join(LISTS)} or a pair such as prompt and completion"
        )
    asked, answered = (record[each] for each in pair)
    if isinstance(asked, list) and isinstance(answered, list):
        before, after = (list(_of_list(record[each], f"{where}: {each}")) for each in pair)
        return before + after, [False] * len(before) + [_is_answer(each) for each in after]
    return _asked(record, pair, where)


def _asked(record: Mapping[str, Any], pair: tuple[str, str], where: str) -> tuple[list[dict[str, Any]], list[bool]]:
    context = next((record[name] for name in CONTEXTS if record.get(name)), None)
    parts = [_text(record[pair[0]], pair[0], where), *([] if context is None else [_text(context, "input", where)])]
    answer = _text(record[pair[1]], pair[1], where)
    found = [{"role": "user", "content": "\n\n".join(parts)}, {"role": ASSISTANT, "content": answer}]
    if record.get(SYSTEM):
        found.insert(0, {"role": SYSTEM, "content": _text(record[SYSTEM], SYSTEM, where)})
    return found, [each["role"] == ASSISTANT for each in found]


def _of_list(value: Any, where: str) -> Iterator[dict[str, Any]]:
    """Messages have a role and a content, or `from` and a `value`. A table may store them as columns."""
    if isinstance(value, dict) and value and all(isinstance(each, list) for each in value.values()):
        value = [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        raise UserError(f"{where} is {type(value).__name__}, and should be a list of messages")
    for number, message in enumerate(value, 1):
        here = f"{where}, message {number}"
        if not isinstance(message, dict):
            raise UserError(f"{here} is {type(message).__name__}, and should be an object with role and content")
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if not isinstance(role, str):
            raise UserError(f"{here} has no role; it has {', '.join(map(repr, message)) or 'nothing'}")
        rest = {name: each for name, each in message.items() if name not in ("from", "value") and each is not None}
        yield {**rest, "role": _ROLES.get(role, role), "content": _parts(content, here)}


def _parts(content: Any, where: str) -> str:
    """The text of a message, or of its text parts. A message that only calls tools may have none."""
    if content is None:
        return ""
    if isinstance(content, list):
        if any(not isinstance(part, dict) or part.get("type", "text") != "text" for part in content):
            raise UserError(f"{where} has parts that are no text, which cannot be trained on")
        return "".join(_text(part.get("text"), "text", where) for part in content)
    return _text(content, "content", where)


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: {name} is not text but {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON may contain half of a surrogate pair
        raise UserError(f"{where}: {name} holds half of a character, which UTF-8 cannot") from None
    return value


def _is_answer(message: Mapping[str, Any]) -> bool:
    """A weight of 0 excludes an answer, as in OpenAI's files."""
    return message["role"] == ASSISTANT and message.get("weight", 1) != 0
