"""The serial models compute what Hugging Face's do: logits, losses and gradients, from the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from cubeloom.models import BERTConfig, from_hugging_face, to_hugging_face

from . import hugging

MODELS = {
    "gpt2": lambda: hugging.gpt2(),
    "gpt2 untied": lambda: hugging.gpt2(tie_word_embeddings=False),
    "llama": lambda: hugging.llama(),
    "llama tied": lambda: hugging.llama(tie_word_embeddings=True),
    "llama far base": lambda: hugging.llama(rope_parameters={"rope_theta": 500000.0, "rope_type": "default"}),
    "bert": lambda: hugging.bert(),
    "bert untied": lambda: hugging.bert(tie_word_embeddings=False),
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())


def compare(theirs: hugging.Theirs, tolerance: float) -> None:
    ours = hugging.ours_of(theirs)
    tokens, targets = hugging.batch()
    their_logits = theirs(tokens).logits.flatten(0, 1)
    assert difference(ours(tokens), their_logits) < tolerance

    their_loss = cross_entropy(their_logits, targets.flatten())
    our_loss = ours(tokens, targets)
    assert difference(our_loss, their_loss) < tolerance

    their_loss.backward()
    our_loss.backward()
    # A gradient has the layout of its parameter, so it converts as the parameter does.
    expected = from_hugging_face(ours.config, gradients(theirs))
    found = gradients(ours)
    assert found.keys() <= expected.keys()
    assert {name: difference(found[name], expected[name]) for name in found} == {
        name: pytest.approx(0.0, abs=tolerance) for name in found
    }


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@every_model
def test_logits_loss_and_gradients_agree_in_float32(make: Callable[[], hugging.Theirs]) -> None:
    compare(hugging.prepare(make()), tolerance=1e-5)


class ExactRMSNorm(nn.RMSNorm):
    """Theirs computes in float32 whatever it is given."""

    def __init__(self, theirs: hugging.Theirs) -> None:
        super().__init__(theirs.weight.shape[0], eps=theirs.variance_epsilon)
        self.weight = theirs.weight


@every_model
def test_logits_loss_and_gradients_agree_in_float64(make: Callable[[], hugging.Theirs]) -> None:
    # Not eager: their softmax is float32 there.
    theirs = hugging.prepare(make(), dtype=torch.float64, attention="sdpa")
    for parent in list(theirs.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                setattr(parent, name, ExactRMSNorm(child))
    compare(theirs, tolerance=1e-10)


@pytest.mark.parametrize("make", [hugging.gpt2, hugging.llama], ids=["gpt2", "llama"])
def test_the_loss_is_theirs_of_the_next_token(make: Callable[[], hugging.Theirs]) -> None:
    theirs = hugging.prepare(make())
    tokens, labels = hugging.batch()
    targets = pad(labels[:, 1:], (0, 1), value=-100)
    assert hugging.ours_of(theirs)(tokens, targets).item() == pytest.approx(
        theirs(tokens, labels=labels).loss.item(), 1e-5
    )


@pytest.mark.parametrize("tied", [True, False])
def test_bert_with_segments_and_the_next_sentence(tied: bool) -> None:
    theirs = hugging.prepare(hugging.bert_for_pretraining(tie_word_embeddings=tied))
    config = hugging.config_of(theirs)
    assert isinstance(config, BERTConfig)
    ours = hugging.ours_of(theirs, replace(config, next_sentence=True))
    tokens, targets = hugging.batch()
    types, labels = (tokens > 30).long(), torch.tensor([0, 1, 1])
    their_loss = theirs(tokens, token_type_ids=types, labels=targets, next_sentence_label=labels).loss
    our_loss = ours(tokens, targets, types=types, next_sentence=labels)
    assert difference(our_loss, their_loss) < 1e-5
    their_loss.backward()
    our_loss.backward()
    expected = from_hugging_face(ours.config, gradients(theirs))
    assert max(difference(gradient, expected[name]) for name, gradient in gradients(ours).items()) < 1e-5
    theirs.load_state_dict(to_hugging_face(ours.config, ours.state_dict()))


def test_label_smoothing_is_torch_s() -> None:
    theirs = hugging.prepare(hugging.gpt2())
    config = replace(hugging.config_of(theirs), label_smoothing=0.1)
    tokens, targets = hugging.batch()
    expected = cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
    assert difference(hugging.ours_of(theirs, config)(tokens, targets), expected) < 1e-5
