"""A cut of the features, or of the sequences, is the same layer with less to do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cubeloom.models import AttentionCore, CrossEntropy, FirstToken, SwiGLU
from cubeloom.models.layers import rotate

CORES = [
    AttentionCore(head_dim=4, queries_per_key=queries, causal=causal, rotary_base=base)
    for queries in (1, 3)
    for causal in (True, False)
    for base in (None, 10000.0)
]
BATCH, SEQUENCE, KV_HEADS = 3, 5, 4


def qkv_for(core: AttentionCore) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(BATCH * SEQUENCE, KV_HEADS * (core.queries_per_key + 2) * core.head_dim, dtype=torch.float64)


@pytest.mark.parametrize("core", [core for core in CORES if core.rotary_base is None], ids=repr)
def test_attention_is_its_definition(core: AttentionCore) -> None:
    qkv = qkv_for(core)
    out = core(qkv, SEQUENCE).view(BATCH, SEQUENCE, KV_HEADS, core.queries_per_key, core.head_dim)
    grouped = qkv.view(BATCH, SEQUENCE, KV_HEADS, core.queries_per_key + 2, core.head_dim)
    for b in range(BATCH):
        for head in range(KV_HEADS):
            key, value = grouped[b, :, head, -2], grouped[b, :, head, -1]
            for query in range(core.queries_per_key):
                scores = grouped[b, :, head, query] @ key.T / math.sqrt(core.head_dim)
                if core.causal:
                    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
                torch.testing.assert_close(out[b, :, head, query], scores.softmax(-1) @ value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("core", CORES, ids=repr)
@pytest.mark.parametrize("parts", [2, 4])
def test_attention_on_a_cut_of_its_heads_or_sequences(core: AttentionCore, parts: int) -> None:
    qkv = qkv_for(core)
    whole = core(qkv, SEQUENCE)
    by_heads = torch.cat([core(part, SEQUENCE) for part in qkv.chunk(parts, dim=1)], dim=1)
    by_sequences = torch.cat([core(part, SEQUENCE) for part in qkv.split(SEQUENCE)])
    torch.testing.assert_close(by_heads, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(by_sequences, whole, rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler itself imports
def test_rotary_positions_turn_alike_when_compiled() -> None:
    """Angles are float32: computed by the compiler, their last digits would be far from the last ones of float64."""
    heads = torch.randn(1, 40, 1, 2, 16, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(rotate)(heads, 1e4), rotate(heads, 1e4), rtol=0, atol=1e-14)


def test_rotary_attention_depends_on_distances_alone() -> None:
    """The same token everywhere: with positions turned away, the scores of equal distances are equal."""
    core = AttentionCore(head_dim=8, causal=False, rotary_base=100.0)
    torch.manual_seed(0)
    qkv = torch.randn(1, 24, dtype=torch.float64).repeat(SEQUENCE, 1)
    qkv[:, 16:] = torch.eye(SEQUENCE, 8, dtype=torch.float64)  # values that show the probabilities
    scores = core(qkv, SEQUENCE)[:, :SEQUENCE].log()
    steps = scores[:, 1:] - scores[:, :1]  # normalisation cancels
    shifted = scores[1:, 2:] - scores[1:, 1:2]
    torch.testing.assert_close(shifted, steps[:-1, :-1], rtol=0, atol=1e-6)  # the angles are float32


def test_swiglu_on_a_cut_of_its_features() -> None:
    gate_up = torch.randn(7, 24)
    gate, up = gate_up[:, ::2], gate_up[:, 1::2]
    assert torch.equal(SwiGLU()(gate_up), torch.nn.functional.silu(gate) * up)
    cut = [SwiGLU()(part) for part in gate_up.split([4, 8, 12], dim=1)]
    assert torch.equal(torch.cat(cut, dim=1), SwiGLU()(gate_up))


def test_cross_entropy_is_the_mean_over_targets_not_ignored() -> None:
    logits, targets = torch.randn(6, 9), torch.tensor([1, -100, 3, 8, -100, 0])
    kept = targets >= 0
    expected = -logits[kept].log_softmax(-1).gather(1, targets[kept, None]).mean()
    torch.testing.assert_close(CrossEntropy()(logits, targets), expected)
    smooth = -logits[kept].log_softmax(-1).mean()
    torch.testing.assert_close(CrossEntropy(label_smoothing=0.2)(logits, targets), 0.8 * expected + 0.2 * smooth)


def test_the_first_token_of_each_sequence() -> None:
    rows = torch.arange(12).view(12, 1)
    assert FirstToken()(rows, 4).flatten().tolist() == [0, 4, 8]
