"""Hugging Face weights, written to a file of ours and read block by block, give the same logits on a grid."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from cubeloom import Grid
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import Config, build, config_from_hugging_face, cut_of, from_hugging_face
from cubeloom.models.weights import save_weights, stored_values
from cubeloom.parallel import Batch, apply


def logits_on(grid: Grid, model: Config, path: str, tokens: torch.Tensor) -> torch.Tensor:
    """This rank's block of the logits, gathered: rows over x, vocabulary over y."""
    network = Network(grid)
    with torch.device("meta"):
        plain = build(model)
    fill = stored_values(path, plain, torch.float64, torch.device("cpu"))
    apply(plain, cut_of(plain), network, Batch(*tokens.shape), fill)
    with torch.no_grad():
        block = plain.eval()(tokens)
    rows = network.axis("x").all_gather(block, 0).wait()
    return network.axis("y").all_gather(rows, 1).wait()


@pytest.mark.slow
def test_hugging_face_weights_on_a_grid(ranks: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tiny = GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    theirs = GPT2LMHeadModel(tiny).double().eval()
    model = config_from_hugging_face(theirs.config.to_dict())
    ours = build(model).double()
    ours.load_state_dict(from_hugging_face(model, theirs.state_dict()))
    save_weights(ours, tmp_path / "weights.safetensors")
    tokens = torch.randint(0, 96, (2, 16))
    with torch.no_grad():
        expected = theirs(tokens).logits.flatten(0, 1)
    for logits in ranks.run(4, logits_on, Grid(x=2, y=2), model, str(tmp_path / "weights.safetensors"), tokens):
        assert (logits - expected).abs().max() < 1e-12
