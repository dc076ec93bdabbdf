"""Tensors of the whole batch: whatever torch computes of them is what it computes of whole ones, and so are gradients."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cubeloom import Grid, UserError
from cubeloom.comm import Network
from cubeloom.comm.batch import BatchTensor, BatchValue
from cubeloom.launch import RankPool

SAMPLES, LENGTH, WIDTH = 6, 4, 5
WEIGHTED_MSE: Any = functional.mse_loss  # a weight is new in torch
Use = Callable[[Tensor, Tensor, Tensor], Any]
# Of `x [samples, length, width]`, `m [samples, length]` of truth values, and `i` of as many indices.
FOLLOWED: dict[str, Use] = {
    "arithmetic": lambda x, m, i: (2 - x) * x / (1 + x**2) + x.exp().clamp(max=2) - torch.where(m[..., None], x, 0.5),
    "broadcast": lambda x, m, i: x * torch.arange(5.0) + x[:, :1] - x[..., 0].unsqueeze(-1) + x.mean((0, 1)),
    "whole ones": lambda x, m, i: x * torch.arange(6.0).view(6, 1, 1) + torch.ones(6, 4, 1),
    "types": lambda x, m, i: (
        x.float().double().to(torch.float64).type_as(x) + m.to(x)[..., None] + m.double()[..., None]
    ),
    "turned": lambda x, m, i: x.transpose(0, 2).permute(1, 0, 2).movedim(2, 0).mT.unsqueeze(1),
    "taken apart": lambda x, m, i: [
        *x.split([1, 3], 1),
        *x.chunk(2, -1),
        *x.unbind(1),
        x.select(2, 1),
        x.narrow(1, 1, 2),
    ],
    "indices": lambda x, m, i: [x[:, 1:], x[..., -1], x[:, None, ::2], x[0:6], x[:, 1, 2], x[:]],
    "squeezed": lambda x, m, i: [x[:, :1].squeeze(), x[:, :1].squeeze(1), x.squeeze(0), x[:, :, :1].squeeze(-1)],
    "regrouped": lambda x, m, i: [
        *(x.view(-1, 5), x.reshape(6, 20), x.flatten(1), x.flatten(), x.view(24, 5).unflatten(0, (6, 4))),
        *(
            x.view(6, 2, -1),
            x.transpose(0, 1).flatten(1),
            x.view(3, 2, 4, 5),
            x.expand(2, 6, 4, 5),
            x[..., :1].expand_as(x),
        ),
    ],
    "joined": lambda x, m, i: [
        torch.cat([x, x * 2, torch.ones(6, 4, 1)], -1),
        torch.stack([x, x]),
        torch.stack([x, -x], 2),
    ],
    "along": lambda x, m, i: [
        x.softmax(-1),
        functional.log_softmax(x, 1),
        x.cumsum(1),
        functional.normalize(x, dim=-1),
        x.sort(-1).values,
    ],
    "reduced": lambda x, m, i: [
        *(x.sum(-1), x.mean(1, True), x.amax((1, 2)), x.max(2).values, x.argmax(-1), x.var(-1), x.logsumexp((-1,))),
        *(
            x.norm(2, -1),
            x.topk(2, -1).values,
            x.sum((1, 2), keepdim=True),
            torch.sum(x, dim=2),
            x.std(2, keepdim=True),
        ),
    ],
    "of the batch": lambda x, m, i: [
        *(
            x.sum(),
            x.mean(),
            torch.mean(x, 0),
            x.sum((0, 1)),
            x.sum(0, keepdim=True),
            (x * m[..., None]).sum() / m.sum(),
        ),
        *(m.any(), m.all(), m.count_nonzero(), m.sum(0), m.any(0), x.mean().exp() * x, x.sum(0) @ x.mean(0).T),
    ],
    "products": lambda x, m, i: [
        *(
            functional.linear(x, torch.ones(3, 5)),
            x @ torch.ones(5, 2),
            x.flatten(0, 1) @ torch.ones(5),
            x @ x.mT,
            torch.bmm(x, x.mT),
        ),
        *(torch.ones(4, 4) @ x, x.flatten(1) @ torch.eye(20)[:3].T),
    ],
    "looked up": lambda x, m, i: [
        *(x.gather(-1, i[..., None]), x.index_select(1, torch.tensor([0, 2])), functional.one_hot(i, 5)),
        *(functional.embedding(i, torch.linspace(0, 1, 10).view(5, 2)), x.take_along_dim(i[..., None], 2)),
    ],
    "layers": lambda x, m, i: [
        *(
            functional.layer_norm(x, (5,)),
            functional.pad(x, (1, 0)),
            functional.conv1d(x, torch.ones(2, 4, 3)),
            functional.avg_pool1d(x, 2),
            functional.group_norm(x, 2),
        ),
        functional.dropout(x, 0.5, training=False),
    ],
    "losses": lambda x, m, i: [
        *(
            functional.cross_entropy(x.transpose(1, 2), i),
            functional.cross_entropy(x.flatten(0, 1), i.flatten(), reduction="sum"),
        ),
        *(
            functional.cross_entropy(
                x.flatten(0, 1), i.masked_fill(m, -100).flatten(), torch.arange(1.0, 6), label_smoothing=0.1
            ),
        ),
        *(
            functional.cross_entropy(x.transpose(1, 2), x.transpose(1, 2).softmax(1)),
            functional.nll_loss(x[:, 0], i[:, 0], reduction="none"),
        ),
        *(
            functional.mse_loss(x, torch.zeros(6, 4, 5)),
            functional.l1_loss(x, x * 0, reduction="sum"),
            functional.huber_loss(x, -x, reduction="none"),
        ),
        *(
            functional.binary_cross_entropy_with_logits(x[..., 0], m.double()),
            functional.smooth_l1_loss(x, x.detach() + 1),
        ),
        *(functional.kl_div(x.log_softmax(-1), x.softmax(-1), reduction=each) for each in ("batchmean", "sum")),
        *(
            functional.gaussian_nll_loss(x, x * 0, x.square() + 1),
            functional.poisson_nll_loss(x, m[..., None].double().expand(6, 4, 5)),
        ),
    ],
    "made": lambda x, m, i: [torch.zeros_like(x), x.new_zeros(6, 2), x.new_tensor(3.0), torch.full_like(m, True)],
    "copied": lambda x, m, i: [x.clone(), x.detach(), copy.deepcopy(x.detach()), x.cpu(), x.contiguous()],
}
GATHERED: dict[str, Use] = {
    "masks": lambda x, m, i: [x[m], x.masked_select(m[..., None]), m.nonzero(), torch.where(m)[0]],
    "of several samples": lambda x, m, i: [
        *(x.softmax(0), x.std(), x.max(), x.cumsum(0), x.flip(0), x.roll(1, 0), x.sort(0).values, x.topk(2, 0).values),
        *(x[0], x[1:], x[::2], x[[1, 0, 0]], torch.cat([x, x]), x.flatten(1) @ x.flatten(1).T, x.split(4), x.norm()),
        *(
            torch.cdist(x.flatten(1), x.flatten(1)),
            torch.einsum("abc,dbc->ad", x, x),
            x.logsumexp((0, 1, 2)),
            x.view(4, 30),
        ),
    ],
    "two ways": lambda x, m, i: [
        x[:, 0] + x[:, 0].T.mean(),
        x[:, 0, :1] * x[:, 0, 1].unsqueeze(0),
        x.T[0, 0] + x[:, 0, 0],
    ],
    "losses": lambda x, m, i: [
        *(
            functional.triplet_margin_loss(x[:, 0], x[:, 1], x[:, 2]),
            functional.cosine_embedding_loss(x[:, 0], x[:, 1], torch.ones(6)),
        ),
        *(
            WEIGHTED_MSE(x, -x, weight=m[..., None].double().expand(6, 4, 5)),
            functional.margin_ranking_loss(x[..., 0], x[..., 1], torch.ones(6, 4)),
        ),
        functional.batch_norm(x, None, None, training=True),
    ],
    "loops": lambda x, m, i: sum((row * k for k, row in enumerate(x)), torch.zeros(4, 5)),
    "values": lambda x, m, i: [
        m.tolist(),
        i.numpy().sum().item(),
        len(x),
        x.shape,
        x.numel(),
        list(i[0]),
        bool(m.any()),
    ],
}


def made() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return (
        x,
        torch.rand(SAMPLES, LENGTH, generator=generator) < 0.6,
        torch.randint(WIDTH, (SAMPLES, LENGTH), generator=generator),
    )


def numbers(found: Any) -> list[Any]:
    return [each for some in found for each in numbers(some)] if isinstance(found, list | tuple) else [found]


def loss_of(found: Any) -> Tensor | None:
    """Something of all that has a gradient, in which no two numbers count alike."""
    total: Tensor | None = None
    for each in numbers(found):
        if isinstance(each, Tensor) and each.requires_grad:
            slopes = torch.arange(1.0, each.numel() + 1, dtype=torch.float64).view(each.shape)
            own = (each * slopes).sum()
            total = own if total is None else total + own
    return total


def alike(one: Any, two: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == two)
    return one.shape == two.shape and torch.allclose(one.double(), two.double(), atol=1e-12)


def wrong(grid: Grid, uses: dict[str, Use]) -> list[str]:
    mesh, found = Network(grid), []
    torch.set_default_dtype(torch.float64)
    try:
        for name, use in uses.items():
            x, m, i = made()
            wanted = use(x.requires_grad_(), m, i)
            y = x.detach().clone().requires_grad_()
            given = use(*mesh.shard([y, m, i]))
            pairs = zip(numbers(wanted), map(mesh.gather, numbers(given)), strict=True)
            found += [
                f"{name} {place}: {one} and {two}" for place, (one, two) in enumerate(pairs) if not alike(one, two)
            ]
            one, two = loss_of(wanted), loss_of(given)
            if one is not None and two is not None:
                one.backward()
                two.backward()
                assert x.grad is not None
                if y.grad is None or not torch.allclose(x.grad, y.grad, atol=1e-11):
                    found.append(f"{name}: gradient {x.grad} and {y.grad}")
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def of_all(grid: Grid) -> tuple[list[str], list[str], list[str]]:
    """The second: what was gathered of that which a rank can compute of its own samples."""
    mesh = Network(grid)
    with mesh.recording() as ledger:
        found = wrong(grid, FOLLOWED)
    return found, [entry.origin for entry in ledger.entries if entry.origin == "samples"], wrong(grid, GATHERED)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [Grid(z=3), pytest.param(Grid(data=2, z=3), marks=pytest.mark.long)])
def test_whatever_is_computed_is_that_of_whole_tensors(grid: Grid, ranks: RankPool) -> None:
    for followed, gathered, other in ranks.run(grid.world, of_all, grid):
        assert followed == [] and other == []
        assert gathered == []


def others(grid: Grid) -> None:
    mesh = Network(grid)
    x, m, i = made()
    whole = i.clone()
    y, k, j = mesh.shard([x.requires_grad_(), m, i])
    assert isinstance(y, BatchTensor) and y.shape == x.shape and y.part.shape[0] == SAMPLES // 3
    assert mesh.shard(y) is y and mesh.shard({"a": 3, "b": torch.tensor(2)}) == {"a": 3, "b": torch.tensor(2)}
    assert y.requires_grad and y.dtype is x.dtype and not y.is_leaf
    with torch.no_grad():
        z = y + 0
    alone = repr(z) if mesh.rank == 0 else ""  # others do not communicate
    assert not alone or "of a batch of [6, 4, 5]" in alone
    # In its place.
    j[:, 0] = 7
    j[k] = -1
    j += 1
    whole[:, 0] = 7
    whole[m] = -1
    assert torch.equal(mesh.gather(j), whole + 1)
    buffer = torch.zeros(SAMPLES + 1, LENGTH, WIDTH, dtype=torch.float64)
    buffer[1:] = z
    assert torch.equal(buffer[1:], x.detach())
    # What is drawn is drawn for the whole batch.
    torch.manual_seed(1)
    drawn = mesh.gather(functional.dropout(y, 0.5))
    torch.manual_seed(1)
    assert torch.equal(drawn, functional.dropout(x, 0.5))
    assert torch.equal(torch.load(saved(z)), x.detach())
    # Gradients of gradients, and those of samples.
    (slope,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
    assert isinstance(slope, BatchTensor) and torch.allclose(mesh.gather(slope), 2 * x)
    (again,) = torch.autograd.grad(slope.square().sum(), y)
    assert torch.allclose(mesh.gather(again), 8 * x)
    y.backward(torch.ones_like(y) * 2)
    assert torch.allclose(torch.as_tensor(x.grad), torch.full_like(x, 2))
    value = y.mean()
    assert type(value) is BatchValue and type(value.detach()) is Tensor and isinstance(value.item(), float)
    with pytest.raises(UserError, match=r"test_batch.py:\d+: mul of \[6, 4, 5\], .* and must have 6, or 1"):
        y * torch.ones(2, 4, 5)
    with pytest.raises(UserError, match="an assignment changes"):
        y[0] = 3
    with pytest.raises(UserError, match=r"add takes .*mesh.gather"):
        torch.add(z, z, out=z)
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        y.backward()
    with pytest.raises(UserError, match="each rank must load as many samples, and they have from 2 to 4"):
        mesh.from_local(torch.zeros(2 + mesh.rank, 3))


def saved(tensor: Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return file


def test_how_such_tensors_are_used(ranks: RankPool) -> None:
    ranks.run(3, others, Grid(data=3))
