"""The files of a Hugging Face tokenizer: the tokenizer, the configuration of its special tokens, and a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cubeloom.base.errors import UserError

TOKENIZER, CONFIG, SPECIALS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
NAMES = (TOKENIZER, CONFIG, SPECIALS, TEMPLATE)


@dataclass(frozen=True)
class TokenizerFiles:
    """The known files of a folder, or a single file. Nothing in them is executed: here a template is text."""

    texts: Mapping[str, str]
    where: Path
    """The tokenizer's own file."""

    @classmethod
    def read(cls, given: Path) -> TokenizerFiles:
        """Raises UserError if there is no tokenizer."""
        if not given.is_dir():
            return cls({TOKENIZER: read(given)}, given)
        if not (given / TOKENIZER).is_file():
            raise UserError(
                f"{given} has no {TOKENIZER}; save_pretrained of a fast tokenizer of transformers writes one"
            )
        found = {name: read(given / name) for name in NAMES if (given / name).is_file()}
        return cls(found, given / TOKENIZER)

    @property
    def template(self) -> str | None:
        """The chat template, if there is one: of several the first, or the one named default."""
        if TEMPLATE in self.texts:
            return self.texts[TEMPLATE]
        found = self._config.get("chat_template")
        if isinstance(found, list):
            by_name = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
            found = by_name.get("default", next(iter(by_name.values()), None))
        return found if isinstance(found, str) else None

    @property
    def special_names(self) -> dict[str, str]:
        """`bos_token`, `eos_token` and so on, under the names that templates use."""
        known = self._json(SPECIALS) | self._config
        found = {name: _content(value) for name, value in known.items() if name.endswith("_token")}
        return {name: text for name, text in found.items() if text is not None}

    @property
    def end(self) -> str | None:
        return self.special_names.get("eos_token")

    @cached_property
    def _config(self) -> dict[str, Any]:
        return self._json(CONFIG)

    def _json(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads(self.texts.get(name, "{}"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.where.parent / name} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise UserError(f"{self.where.parent / name} should be a JSON object")
        return found


def _content(value: Any) -> str | None:
    """The text of a token that is described by a dictionary."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) and found else None


def read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"no tokenizer at {file}: {error.strerror}; it is bytes, bpe or a tokenizer file") from None
    except UnicodeDecodeError:
        raise UserError(f"{file} is not a tokenizer file of Hugging Face: it is not text") from None
