"""A model that others wrote, in a plain training loop: Hugging Face's Llama, small, on x=2,y=2 beside its serial self.

python examples/any_model.py
torchrun --nproc-per-node 4 examples/any_model.py --torchrun
"""

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import cubeloom
from cubeloom.launch import run

GRID = {"x": 2, "y": 2}
SAMPLES, VOCAB = 4, 64
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def batch() -> dict[str, Tensor]:
    tokens = torch.arange(SAMPLES * 16).view(SAMPLES, 16) * 7 % VOCAB
    return {"input_ids": tokens, "labels": tokens}  # it shifts the labels itself


def train(sizes: dict[str, int]) -> list[float]:
    mesh = cubeloom.init(device="cpu", **sizes)
    torch.manual_seed(0)  # the same values on every rank
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=16, **SIZES)).double()
    report = cubeloom.parallelize(model, mesh)
    if mesh.rank == 0 and sizes:
        print(report)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        loss = model(**mesh.shard(batch())).loss  # the mean over the whole batch
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare() -> None:
    (serial,) = run(1, train, {})
    cut = run(4, train, GRID)[0]
    for step, (one, four) in enumerate(zip(serial, cut, strict=True)):
        print(f"step {step}   serial {one:.7f}   on x=2,y=2 {four:.7f}")
        assert abs(one - four) < 1e-5  # Llama takes its loss in single precision


if __name__ == "__main__":
    if "--torchrun" in sys.argv:
        print(train(GRID))
    else:
        compare()
