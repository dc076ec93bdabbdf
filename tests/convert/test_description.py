"""A configuration survives the way through JSON, whichever it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cubeloom import UserError
from cubeloom.models import PRESETS, Config
from cubeloom.models.description import config_from, describe


@pytest.mark.parametrize("config", PRESETS.values(), ids=PRESETS.keys())
def test_there_and_back(config: Config) -> None:
    assert config_from(json.loads(json.dumps(describe(config)))) == config


def test_fields_that_are_missing_have_their_defaults() -> None:
    gpt = {"family": "gpt", "vocab": 8, "positions": 4, "hidden": 8, "layers": 1, "heads": 2}
    assert describe(config_from(gpt)) == {**gpt, "tied": True, "dropout": 0.0, "norm_eps": 1e-5, "label_smoothing": 0.0}


@pytest.mark.parametrize(
    ("description", "said"),
    [
        ({}, "unknown family of models 'None'"),
        ({"family": "gtp"}, "did you mean 'gpt'[?] There are gpt, llama, bert, unet, resnet"),
        ({"family": "gpt", "vocabulary": 8}, "unknown setting model.vocabulary; did you mean 'vocab'?"),
        ({"family": "gpt", "vocab": 8}, "model.positions is not set"),
    ],
)
def test_others_are_refused(description: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        config_from(description)
