"""Tokenizers of the `tokenizers` package: read from a file, or trained here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cubeloom.base.errors import UserError
from cubeloom.train.data.tokenizer import END as END
from cubeloom.train.data.tokenizer import Array
from cubeloom.train.data.tokenizer_files import read

# The usual names of the token that ends a document, the most common first.
KNOWN_ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
SMALLEST = 257
"""A trained vocabulary has every byte and the end token, so that it can encode any text."""


class HuggingFace:
    """A tokenizer file, with the name of the token that ends a document (found automatically if it is a usual one)."""

    def __init__(self, file: Path, end: str | None = None) -> None:
        text = read(file)
        self._made = _made(file, text)
        self._text = text
        self._file = file
        # Text that looks like the end token is encoded as text.
        self._made.encode_special_tokens = True
        vocabulary = self._made.get_vocab()
        names = [end] if end is not None else [name for name in KNOWN_ENDS if name in vocabulary]
        if not names or names[0] not in vocabulary:
            asked = f"no token {end!r}" if end is not None else f"none of {', '.join(KNOWN_ENDS)}"
            raise UserError(f"{file} has {asked} to end a document with; name one of its tokens with --end")
        self.end: int = vocabulary[names[0]]
        self.end_text = names[0]
        self.vocabulary: int = max(vocabulary.values()) + 1
        self.fingerprint = f"sha256:{hashlib.sha256(text.encode()).hexdigest()} end:{self.end}"

    def encode(self, texts: Sequence[str]) -> list[Array]:
        found = self._made.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.uint32) for each in found]

    @property
    def specials(self) -> dict[str, int]:
        added = self._made.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special} | {self.end_text: self.end}

    def encode_special(self, text: str) -> tuple[Array, Array]:
        found = self._of_templates.encode(text, add_special_tokens=False)
        return np.array(found.ids, np.uint32), np.array([end for _, end in found.offsets], np.int64)

    @cached_property
    def _of_templates(self) -> Any:
        """The same tokenizer, in which special tokens count as such."""
        made = _made(self._file, self._text)
        made.encode_special_tokens = False
        return made

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._made.decode([token for token in tokens if token != self.end], skip_special_tokens=False))


def _made(file: Path, text: str) -> Any:
    """Files often have the settings of a model's own training. Here no text is truncated or padded."""
    try:
        made = _package().Tokenizer.from_str(text)
    except Exception as error:  # the package raises plain Exceptions
        raise UserError(f"{file} is not a tokenizer file of Hugging Face: {error}") from None
    made.no_truncation()
    made.no_padding()
    return made


def train(texts: Iterator[str], vocabulary: int) -> str:
    """Byte-level BPE, as the text of a tokenizer file. The same texts give the same file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return str(made.to_str(pretty=True))


def require() -> None:
    """Raise early if the package is not installed."""
    _package()


def _package() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError("this tokenizer needs the package tokenizers: pip install 'cubeloom[text]'") from None
    return tokenizers
