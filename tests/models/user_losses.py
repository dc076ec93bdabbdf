"""Losses that users write on what a model gives: each is a function of it and of the batch, as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB, WIDTH, LENGTH, SAMPLES = 24, 16, 6, 4
Given = dict[str, Tensor]


class Scorer(nn.Module):
    """Gives logits and what they are made of, and a mean of that."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.embed(tokens)
        x = x + self.down(functional.gelu(self.up(self.norm(x))))
        return {"logits": self.head(x), "hidden": x.cumsum(1) / x.shape[1], "size": x.square().mean()}


def batch_of() -> Given:
    """Samples have different numbers of words and of targets, and none are alike."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.tensor([6, 2, 5, 4])
    mask = torch.arange(LENGTH) < lengths[:, None]
    return {
        "tokens": tokens,
        "targets": tokens.roll(-1, 1).masked_fill(~mask, -100),
        "mask": mask,
        "lengths": lengths,
        "weights": torch.rand(SAMPLES, LENGTH, generator=generator, dtype=torch.float64),
        "teacher": torch.randn(SAMPLES, LENGTH, VOCAB, generator=generator, dtype=torch.float64),
    }


def each_target(given: Given, batch: Given) -> Tensor:
    loss = functional.cross_entropy(given["logits"].flatten(0, 1), batch["targets"].flatten(), reduction="none")
    return loss.view(batch["targets"].shape)


def cross_entropy(given: Given, batch: Given) -> Tensor:
    return functional.cross_entropy(given["logits"].transpose(1, 2), batch["targets"])


def flat_cross_entropy(given: Given, batch: Given) -> Tensor:
    """Shifted, as in Hugging Face's models."""
    logits = given["logits"][:, :-1, :].contiguous().view(-1, VOCAB)
    return functional.cross_entropy(logits, batch["targets"][..., 1:].contiguous().view(-1))


def masked_mean(given: Given, batch: Given) -> Tensor:
    return (each_target(given, batch) * batch["mask"]).sum() / batch["mask"].sum()


def weighted_mean(given: Given, batch: Given) -> Tensor:
    chosen = given["logits"].log_softmax(-1).gather(-1, batch["tokens"].unsqueeze(-1)).squeeze(-1)
    return -(chosen * batch["weights"]).sum() / batch["weights"].sum()


def mean_of_means(given: Given, batch: Given) -> Tensor:
    """Of each sequence, as in sequence-level policies."""
    mask = batch["mask"].double()
    return ((each_target(given, batch) * mask).sum(1) / mask.sum(-1)).mean()


def a_sum(given: Given, batch: Given) -> Tensor:
    return functional.cross_entropy(
        given["logits"].reshape(-1, VOCAB), batch["targets"].reshape(-1), reduction="sum", label_smoothing=0.1
    )


def sum_over_sizes(given: Given, batch: Given) -> Tensor:
    return given["hidden"].square().sum() / (len(given["hidden"]) * given["hidden"].size(1))


def class_weights(given: Given, batch: Given) -> Tensor:
    weight = torch.linspace(0.5, 2, VOCAB, dtype=torch.float64)
    return functional.cross_entropy(given["logits"].flatten(0, 1), batch["targets"].flatten(), weight)


def distilled(given: Given, batch: Given) -> Tensor:
    student, teacher = given["logits"].log_softmax(-1), batch["teacher"].softmax(-1)
    return functional.kl_div(student, teacher, reduction="batchmean") + functional.mse_loss(
        given["logits"], batch["teacher"]
    )


def root_of_a_mean(given: Given, batch: Given) -> Tensor:
    return given["hidden"].square().mean().sqrt() * (1 + functional.l1_loss(given["logits"], batch["teacher"]))


def of_a_mean_inside(given: Given, batch: Given) -> Tensor:
    """That the model took."""
    size = given["size"] if "size" in given else given["hidden"].square().mean()
    return size.log() * size + size.sqrt()


def chosen_targets(given: Given, batch: Given) -> Tensor:
    """By a mask, of which each sample has another number."""
    return functional.cross_entropy(given["logits"][batch["mask"]], batch["tokens"][batch["mask"]])


def contrastive(given: Given, batch: Given) -> Tensor:
    """Every sample with every other."""
    pooled = functional.normalize(given["hidden"].mean(1), dim=-1)
    similar = pooled @ pooled.T / 0.2
    return functional.cross_entropy(similar, torch.arange(len(pooled)))


def standardised(given: Given, batch: Given) -> Tensor:
    """As advantages are, over the whole batch."""
    score = given["hidden"].sum(-1)
    score = (score - score.mean()) / (score.std() + 1e-3)
    return (score * batch["weights"]).logsumexp((0, 1))


def last_word(given: Given, batch: Given) -> Tensor:
    """Of each sample, by its length."""
    logits = given["logits"][torch.arange(len(given["logits"])), batch["lengths"] - 1]
    return functional.nll_loss(functional.log_softmax(logits, -1), batch["tokens"][:, 0])


def hardest(given: Given, batch: Given) -> Tensor:
    """The samples with the largest losses, and the largest of all."""
    losses = each_target(given, batch).sum(1)
    return losses.topk(2).values.mean() + 0.1 * losses.max()


def by_steps(given: Given, batch: Given) -> Tensor:
    """A loop over samples."""
    total = given["logits"].new_zeros(())
    for row, length in zip(given["hidden"], batch["lengths"].tolist(), strict=True):
        total = total + row[:length].abs().sum()
    return total / batch["lengths"].sum()


def changed_in_place(given: Given, batch: Given) -> Tensor:
    targets, logits = batch["targets"].clone(), given["logits"].clone()
    targets[:, 0] = -100
    targets[targets == 1] = -100
    logits[..., 0] = -5.0
    logits *= 0.5
    return functional.cross_entropy(logits.permute(0, 2, 1), targets)


def with_metrics(given: Given, batch: Given) -> Tensor:
    """What a loop counts beside its loss, and uses as a number."""
    with torch.no_grad():
        right = (given["logits"].argmax(-1) == batch["targets"]) & batch["mask"]
        accuracy = (right.sum() / batch["mask"].sum()).item()
        assert len(right.tolist()) == len(batch["mask"].numpy()) == SAMPLES
        assert str(right) and bool(batch["mask"].any())
    return masked_mean(given, batch) * (1 + accuracy) / int(batch["mask"].sum())


LOSSES: dict[str, Callable[[Given, Given], Tensor]] = {
    each.__name__: each
    for each in (
        *(cross_entropy, flat_cross_entropy, masked_mean, weighted_mean, mean_of_means, a_sum, sum_over_sizes),
        *(class_weights, distilled, root_of_a_mean, chosen_targets, contrastive, standardised, last_word, hardest),
        *(by_steps, changed_in_place, with_metrics, of_a_mean_inside),
    )
}


class Head(nn.Module):
    """A plain module behind the model, which nobody cut: all ranks must keep the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 1).double()

    def forward(self, given: Given, batch: Given) -> Any:
        value = self.linear(given["hidden"]).squeeze(-1)
        return ((value - batch["weights"]) ** 2 * batch["mask"]).sum() / batch["mask"].sum()
