"""A cut of the features, or of the sequences, is the same layer with less to do."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cubeloom.models import AttentionByHead, AttentionCore, CrossEntropy, FirstToken, SwiGLU
from cubeloom.models.layers import rotate, turns

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
    queries = KV_HEADS * core.queries_per_key
    out = core(qkv, SEQUENCE).view(BATCH, SEQUENCE, queries, core.head_dim)
    heads = qkv.view(BATCH, SEQUENCE, queries + 2 * KV_HEADS, core.head_dim)
    for b in range(BATCH):
        for query in range(queries):
            key = queries + query // core.queries_per_key
            scores = heads[b, :, query] @ heads[b, :, key].T / math.sqrt(core.head_dim)
            if core.causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
            mixed = scores.softmax(-1) @ heads[b, :, key + KV_HEADS]
            torch.testing.assert_close(out[b, :, query], mixed, rtol=0, atol=1e-12)


def part_of_each(fused: Tensor, sizes: list[int], parts: int) -> list[Tensor]:
    """The parts that ranks would have: equal ones of every section."""
    cut = [section.chunk(parts, dim=1) for section in fused.split(sizes, dim=1)]
    return [torch.cat(each, dim=1) for each in zip(*cut, strict=True)]


@pytest.mark.parametrize("core", CORES, ids=repr)
@pytest.mark.parametrize("parts", [2, 4])
def test_attention_on_a_cut_of_its_heads_or_sequences(core: AttentionCore, parts: int) -> None:
    qkv = qkv_for(core)
    whole = core(qkv, SEQUENCE)
    keys = KV_HEADS * core.head_dim
    sections = [keys * core.queries_per_key, keys, keys]
    by_heads = torch.cat([core(part, SEQUENCE) for part in part_of_each(qkv, sections, parts)], dim=1)
    by_sequences = torch.cat([core(part, SEQUENCE) for part in qkv.split(SEQUENCE)])
    torch.testing.assert_close(by_heads, whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(by_sequences, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_head_by_head_is_that_of_sections(causal: bool) -> None:
    core = AttentionCore(head_dim=4, causal=causal)
    qkv = qkv_for(core)
    by_head = qkv.unflatten(1, (3, KV_HEADS, 4)).transpose(1, 2).flatten(1)
    own = AttentionByHead(head_dim=4, causal=causal)
    whole = core(qkv, SEQUENCE)
    assert torch.equal(own(by_head, SEQUENCE), whole)
    assert torch.equal(torch.cat([own(part, SEQUENCE) for part in by_head.chunk(2, dim=1)], dim=1), whole)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the compiler itself imports
def test_rotary_positions_turn_alike_when_compiled() -> None:
    """Angles are float32: computed by the compiler, their last digits would be far from the last ones of float64."""
    heads = torch.randn(1, 40, 2, 16, dtype=torch.float64)

    def turned(heads: Tensor) -> Tensor:
        return rotate(heads, *turns(heads, 1e4))

    torch.testing.assert_close(torch.compile(turned)(heads), turned(heads), rtol=0, atol=1e-14)


def test_rotary_positions_turn_the_features_of_both_halves() -> None:
    heads = torch.randn(2, SEQUENCE, 3, 8, dtype=torch.float64)
    angles = (torch.arange(SEQUENCE)[:, None] * 100.0 ** -(torch.arange(0, 8, 2) / 8))[:, None, :]
    turned = torch.complex(*heads.chunk(2, dim=-1)) * torch.exp(1j * angles)
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(
        rotate(heads, *turns(heads, 100.0)), expected, rtol=0, atol=1e-6
    )  # the angles are float32


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
    gate, up = gate_up[:, :12], gate_up[:, 12:]
    assert torch.equal(SwiGLU()(gate_up), torch.nn.functional.silu(gate) * up)
    cut = [SwiGLU()(part) for part in part_of_each(gate_up, [12, 12], 3)]
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
