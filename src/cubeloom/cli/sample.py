"""`cubeloom sample`: text from a trained model."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from cubeloom.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Continue a text with the newest or the best checkpoint of a run, in one process, whatever grid trained it."""

    run: tyro.conf.Positional[Path]
    """The folder of a run."""
    best: bool = False
    """Use the checkpoint with the lowest validation loss, instead of the newest."""
    model: str | None = None
    """The file.py:function of the run's model, if it is one: a file that a checkpoint names is not executed."""
    prompt: str = "\n"
    tokens: int = 200
    temperature: float = 0.8
    """0 always takes the most likely token."""
    seed: int = 0
    json: Annotated[bool, tyro.conf.arg(aliases=["-j"])] = False
    """Print one JSON object as the last line."""

    def __call__(self) -> int:
        if self.tokens < 1 or self.temperature < 0 or not self.prompt:
            raise UserError("--tokens is at least 1, --temperature 0 or more, and --prompt has at least one character")
        from cubeloom.tools.sample import Trained, continue_

        trained = Trained.of(self.run, self.best, self.model)
        begin = [int(token) for token in trained.tokenizer.encode([self.prompt])[0]]
        found = []
        vocabulary = trained.tokenizer.vocabulary
        for token in continue_(trained.model, vocabulary, begin, self.tokens, self.temperature, self.seed):
            if token == trained.tokenizer.end:
                break
            found.append(token)
        text = trained.tokenizer.decode([*begin, *found])
        sys.stdout.write(text + "\n")
        if self.json:
            print(json.dumps({"text": text, "tokens": len(found)}))
        return 0
