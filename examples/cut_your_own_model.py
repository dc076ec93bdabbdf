"""Cut a model of your own: write it as plain PyTorch, say beside it how each layer lies, and train it on x=2,y=2.

python examples/cut_your_own_model.py
"""

import torch
from torch import Tensor, nn

from cubeloom import Grid
from cubeloom.base.initial import Constant, Initial, Normal
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.parallel import Batch, Cut, apply, initial_values, materialise
from cubeloom.parallel.layers import Contract, Embedding, Expand, Loss, Norm

VOCAB, WIDTH, LAYERS = 64, 32, 3
GRID, BATCH = Grid(x=2, y=2), Batch(samples=4, sequence=8)


class NextToken(nn.Module):  # guesses a token from the one before it, and knows nothing of devices
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.wide = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(LAYERS))
        self.narrow = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens.flatten())  # activations are [rows, features], a row for each token
        for norm, wide, narrow in zip(self.norms, self.wide, self.narrow, strict=True):
            x = x + narrow(torch.relu(wide(norm(x))))
        return self.loss(self.head(x), targets.flatten())

    def initial(self, name: str) -> Initial:
        """How the named parameter starts: drawn by name and place, so that every grid starts from the same model."""
        if name.endswith("bias"):
            return Constant(0.0)
        return Constant(1.0) if "norms" in name else Normal(0.1)


CUT: Cut = {
    "embed": Embedding(),
    "norms.*": Norm(),
    "wide.*": Expand(),  # features from x to y
    "narrow.*": Contract(),  # and back to x
    "head": Expand(sharded_output=True),  # the loss wants its rows cut, however activations rest
    "loss": Loss(head="head"),  # of its outputs; padded where the grid does not divide them
}


def train(grid: Grid | None) -> list[float]:
    with torch.device("meta"):
        model = NextToken()
    fill = initial_values(model, seed=0, dtype=torch.float64)
    if grid is None:
        materialise(model, fill)
    else:
        apply(model, CUT, Network(grid), BATCH, fill)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.arange(BATCH.samples * BATCH.sequence).view(BATCH.samples, BATCH.sequence)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(tokens, (tokens + 1) % VOCAB)  # the whole batch: only data and z would cut it
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    with RankPool(GRID.world) as pool:
        (serial,) = pool.run(1, train, None)
        cut = pool.run(GRID.world, train, GRID)[0]
    for step, (one, four) in enumerate(zip(serial, cut, strict=True)):
        print(f"step {step}   serial {one:.12f}   on {GRID} {four:.12f}")
        assert abs(one - four) < 1e-10
