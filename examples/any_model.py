"""Cut a model that others wrote: Hugging Face's Llama, small, as it comes, on x=2,y=2 beside its serial self.

python examples/any_model.py
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import cubeloom
from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool

GRID, SAMPLES, VOCAB = Grid(x=2, y=2), 4, 64
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def build() -> Any:
    torch.manual_seed(0)  # the same values on every rank
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=16, **SIZES)).double()


def batch() -> dict[str, Tensor]:
    tokens = torch.arange(SAMPLES * 16).view(SAMPLES, 16) * 7 % VOCAB
    return {"input_ids": tokens, "labels": tokens}  # it shifts the labels itself


def train(grid: Grid | None) -> list[float]:
    model, inputs = build(), batch()
    if grid is not None:
        network = Network(grid)
        inputs = {name: network.share(value) for name, value in inputs.items()}  # of data and z; here it is all
        proposal = cubeloom.cut(model, grid, inputs)
        proposal.apply(model, network)
        if network.rank == 0:
            print(proposal)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(**inputs).loss  # of the whole batch, as are the gradients
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    with RankPool(GRID.world) as pool:
        (serial,) = pool.run(1, train, None)
        cut = pool.run(GRID.world, train, GRID)[0]
    for step, (one, four) in enumerate(zip(serial, cut, strict=True)):
        print(f"step {step}   serial {one:.7f}   on {GRID} {four:.7f}")
        assert abs(one - four) < 1e-5  # Llama takes its loss in single precision
