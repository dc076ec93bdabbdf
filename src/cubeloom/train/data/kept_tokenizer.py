"""The tokenizer that is stored with a run, an import or an export, in files that transformers also reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.base.files import (
    check_sealed,
    checksum,
    is_plain_name,
    read_json,
    replace_folder,
    replace_text,
    write_sealed,
)
from cubeloom.train.data.hugging_face import HuggingFace
from cubeloom.train.data.tokenizer import END, Bytes, Tokenizer
from cubeloom.train.data.tokenizer_files import CONFIG, TOKENIZER

FOLDER = "tokenizer"
"""The folder in a run, or beside an imported checkpoint."""
_KEPT = "kept.json"  # identifies the tokenizer, and has checksums of the other files


def keep(tokenizer: Tokenizer, files: Mapping[str, str], beside: Path) -> None:
    """Write the folder. `files`: the tokenizer's existing files; others that transformers needs are added."""
    texts = dict(files)
    if TOKENIZER not in texts:
        texts[TOKENIZER] = _bytes_as_file()
    texts.setdefault(CONFIG, _config(tokenizer.end_text))
    said = {"end": tokenizer.end_text, "fingerprint": tokenizer.fingerprint}
    writing, target = beside / f".{FOLDER}.writing", beside / FOLDER
    writing.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        replace_text(writing / name, text)
    write_sealed(writing / _KEPT, {**said, "files": {name: checksum(writing / name) for name in texts}})
    replace_folder(writing, target)


def kept(beside: Path) -> Tokenizer | None:
    """The tokenizer stored there; None if there is none. Raises UserError if its files have changed."""
    folder = beside / FOLDER
    if not (folder / _KEPT).is_file():
        return None
    known = _checked(folder)
    if known["fingerprint"] == Bytes.fingerprint:
        return Bytes()
    found = HuggingFace(folder / TOKENIZER, known["end"])
    if found.fingerprint != known["fingerprint"]:
        raise UserError(f"{folder / TOKENIZER} is damaged: it is not what was written")
    return found


def kept_files(checkpoint: Path) -> dict[str, str]:
    """The tokenizer files of a checkpoint's run, or of its import, by name."""
    for beside in (checkpoint.resolve().parent, checkpoint.resolve().parent.parent):
        if (beside / FOLDER / _KEPT).is_file():
            names = _checked(beside / FOLDER)["files"]
            return {name: (beside / FOLDER / name).read_text(encoding="utf-8") for name in names}
    return {}


def _checked(folder: Path) -> dict[str, Any]:
    known = read_json(folder / _KEPT)
    check_sealed(folder / _KEPT, known)
    texts = (known.get("end"), known.get("fingerprint"))
    if not all(isinstance(each, str) for each in texts) or not isinstance(known.get("files"), dict):
        raise UserError(f"{folder / _KEPT} is damaged: it does not say which tokenizer it is")
    for name, digest in known["files"].items():
        if not is_plain_name(name) or not (folder / name).is_file():
            raise UserError(f"{folder} is not whole: {name} is missing")
        if checksum(folder / name) != digest:
            raise UserError(f"{folder / name} is damaged: it is not what was written")
    return known


def _config(end: str) -> str:
    """What transformers needs to know about a tokenizer without a configuration."""
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}
    return json.dumps(said, indent=2) + "\n"


def _bytes_as_file() -> str:
    """The byte tokenizer, as a byte-level BPE without merges."""
    made: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": Bytes.end,
                "content": END,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }
    return json.dumps(made, indent=2, ensure_ascii=False) + "\n"


def _byte_characters() -> list[str]:
    """The character for each byte in byte-level tokenizers: itself if it is printable, otherwise one from 256 on."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]
