"""Conversations in the forms that people keep them in, and a tokenizer folder with a chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cubeloom.train.data import TokenFile
from cubeloom.train.data.hugging_face import train

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen 3: what was thought before earlier answers is not shown again, and the last answer begins with an empty thought.
FORGETTING = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if loop.last and message.role == 'assistant' %}<think></think>{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION, ANSWER = "Wie weit ist der Mond?", "384 400 km – weit."


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TWO_TURNS = [
    turn("system", "Be brief."),
    turn("user", "one"),
    turn("assistant", "1"),
    turn("user", "two"),
    turn("assistant", "2"),
]


def records(path: Path, found: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in found), "utf-8")
    return path


def tokenizer_folder(folder: Path, template: str | None = CHATML) -> Path:
    """A byte-level BPE whose special tokens are ChatML's; `<|im_end|>` is its end token."""
    folder.mkdir()
    made = json.loads(train(iter(["the moon is far", QUESTION, ANSWER]), 280))
    (end,) = made["added_tokens"]
    for number, name in enumerate(("<|im_start|>", "<|im_end|>"), 280):
        made["added_tokens"].append({**end, "id": number, "content": name})
    (folder / "tokenizer.json").write_text(json.dumps(made), "utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


def learned(file: TokenFile) -> list[list[str]]:
    """The text of each run of tokens that count, by document."""
    assert file.counted is not None
    marks, names = file.counted[:], {number: name for name, number in file.tokenizer.specials.items()}
    found, start = [], 0
    for end in file.documents[:]:
        runs: list[list[int]] = [[]]
        for place in range(start, int(end)):
            if marks[place]:
                runs[-1].append(int(file.tokens[place : place + 1][0]))
            elif runs[-1]:
                runs.append([])
        found.append([text(file, run, names) for run in runs if run])
        start = int(end)
    return found


def text(file: TokenFile, tokens: Iterable[int], names: Mapping[int, str]) -> str:
    """With special tokens by name."""
    parts: list[str] = []
    plain: list[int] = []
    for token in tokens:
        if token in names:
            parts += [file.tokenizer.decode(plain), names[token]]
            plain = []
        else:
            plain.append(token)
    return "".join([*parts, file.tokenizer.decode(plain)])


def whole(file: TokenFile, number: int) -> str:
    names = {token: name for name, token in file.tokenizer.specials.items()}
    return text(file, file.document(number).tolist(), names)
