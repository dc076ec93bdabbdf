"""What a model is trained on, and the names of its forward's arguments for what a source of data provides."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cubeloom.models.example import TARGET_NAMES, TOKEN_NAMES

IGNORED = -100  # a target that does not count, in torch and in transformers


@dataclass(frozen=True)
class Naming:
    """Sources of data provide `tokens` and `targets`, `images` and `targets`, or `images`, `noise` and `times`."""

    data: str | None  # the source of data that suits it (train/job/registries.py); None: only random samples do
    names: tuple[tuple[str, str], ...]  # from names of a source of data to those of the forward
    shifted: bool = False  # the model itself shifts the targets by one token

    @property
    def targets(self) -> str | None:
        """The forward's name of its targets."""
        return dict(self.names).get("targets")

    def __call__(self, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """With the forward's names; what it does not take is left out."""
        found = {theirs: data[ours] for ours, theirs in self.names}
        if self.shifted:
            targets = dict(self.names)["targets"]
            found[targets] = _one_later(found[targets])
        return found


def _one_later(targets: Tensor) -> Tensor:
    """Labels for a model that shifts them itself: the token at each position. The last target has no position."""
    later = torch.full_like(targets, IGNORED)
    later[:, 1:] = targets[:, :-1]
    return later


OWN = Naming(None, ())
_TEXT = (("tokens", "input_ids"), ("targets", "labels"))


def naming_of_hugging_face(architecture: type[nn.Module], encoder_decoder: bool) -> Naming:
    """By the class, with transformers' names."""
    name, takes = architecture.__name__, getattr(architecture, "main_input_name", "")
    if name.endswith("ForMaskedLM"):
        return Naming("masked-tokens", _TEXT)
    if name.endswith("ForImageClassification"):
        return Naming("images", (("images", "pixel_values"), ("targets", "labels")))
    generates = getattr(architecture, "can_generate", lambda: False)
    if takes == "input_ids" and generates() and not encoder_decoder:
        return Naming("tokens", _TEXT, shifted=True)
    return OWN


def naming_of(model: nn.Module) -> Naming:
    """For a user's own model: by the names of its forward's arguments."""
    config = getattr(model, "config", None)
    if hasattr(type(model), "main_input_name") and config is not None:
        kind = next(
            each for each in type(model).__mro__ if each.__module__.partition(".")[0] != __name__.partition(".")[0]
        )
        return naming_of_hugging_face(kind, bool(getattr(config, "is_encoder_decoder", False)))
    taken = list(inspect.signature(model.forward).parameters)
    tokens = next((name for name in TOKEN_NAMES if name in taken), None)
    targets = next((name for name in TARGET_NAMES if name in taken), None)
    if tokens is not None and targets is not None and any(isinstance(each, nn.Embedding) for each in model.modules()):
        return Naming("tokens", (("tokens", tokens), ("targets", targets)))
    if "images" in taken and targets is not None:
        return Naming("images", (("images", "images"), ("targets", targets)))
    return OWN
