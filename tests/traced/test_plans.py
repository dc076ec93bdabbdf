"""Plans of layers: those that a model carries say where the search begins, those that a user gives hold or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import cubeloom
from cubeloom import Grid, UserError
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models.example import example_of
from cubeloom.parallel.traced import Traced, trace
from cubeloom.parallel.traced.units import units_of

from .parity import Difference, compare

WIDTH, INNER = 8, 16


class Gated(nn.Module):
    """A table, two linears whose outputs meet in one that follows, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, WIDTH)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens)
        gate, up = self.gate_up(h).chunk(2, -1)
        h = self.norm(h + self.down(gate.sigmoid() * up))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), tokens.flatten())


EXAMPLE = {"tokens": torch.arange(24).view(4, 6) % 12}
GIVEN = {
    "table": "embedding_rowwise",
    "gate_up": "packed_colwise",
    "down": "rowwise",
    "norm": "sequence_parallel",
    "head": "colwise_gather_output",
}
ODD = {"gate_up": "replicate", "down": "colwise_gather_output", "norm": "replicate", "head": "replicate"}


def gated() -> Gated:
    torch.manual_seed(0)
    return Gated().double()


def lies(traced: Traced) -> dict[str, str]:
    """What the report says of each layer."""
    lines = [line.split() for line in str(traced).splitlines() if "bytes  " in line]
    return {name: " ".join(words[1:-3]) for name, *words in lines}


def test_the_plan_of_llama_is_where_its_layers_begin() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        )
    found = trace(model, Grid(x=2, y=2), example_of(model))
    origins = {name.rpartition(".")[2]: origin for name, origin in found.origins.items()}
    planned = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
    assert {name for name, origin in origins.items() if origin == "plan"} == set(planned)
    assert origins["input_layernorm"] == "traced"  # of which the plan says nothing
    assert all(line.endswith(("plan", "traced")) for line in str(found).splitlines() if line.startswith("  "))


def test_a_plan_saves_tries_and_changes_nothing_else() -> None:
    """What is gathered is tried as logits first."""
    refused: dict[bool, list[str]] = {True: [], False: []}
    found = {}
    for carried, heard in refused.items():
        model = gated()
        if carried:
            model._tp_plan = {"head": "colwise_gather_output", "gate_up": "a_style_of_tomorrow"}  # type: ignore[assignment]
        found[carried] = trace(model, Grid(x=2, y=2), EXAMPLE, heard.append)
    assert len(refused[True]) < len(refused[False])
    assert lies(found[True]) == lies(found[False])
    assert found[True].origins == {**found[False].origins, "head": "plan"}


def steps(grid: Grid) -> list[Difference]:
    batch = {"tokens": torch.arange(24).view(4, 6) * 5 % 12}
    return [
        compare(Network(grid), gated(), batch, lambda model, batch: model(**batch), plan=plan)
        for plan in (GIVEN, ODD, {"table": "replicate", "down": "rowwise"})
    ]


@pytest.mark.parametrize("grid", ["x=2,y=2", "y=2,z=2"])
def test_a_plan_that_a_user_gives_is_exact(grid: str, ranks: RankPool) -> None:
    where = Grid.parse(grid)
    for found in ranks.run(where.world, steps, where):
        for number, difference in enumerate(found):
            difference.check(f"plan {number}")


def test_a_plan_that_a_user_gives_holds() -> None:
    found = trace(gated(), Grid(x=2, y=2), EXAMPLE, plan=GIVEN)
    assert set(found.origins.values()) == {"given"}
    assert lies(found)["head"].startswith("x·y to y, as logits")
    odd = trace(gated(), Grid(x=2, y=2), EXAMPLE, plan=ODD)
    assert {name for name, how in lies(odd).items() if how.startswith("whole ")} >= {"gate_up", "norm", "head"}
    assert odd.origins["table"] == "traced"


@pytest.mark.parametrize(
    "plan, said",
    [
        ({"down": "rowwize"}, "gives down the style 'rowwize', which is not known; did you mean 'rowwise'"),
        ({"donw": "rowwise"}, "names donw, and Gated has no module of that name; the nearest: down"),
        ({"table": "colwise"}, "gives table the style 'colwise', which is for a linear; it is a Embedding"),
        ({"gate_up": "moe_tp_experts"}, "which is not known"),
        ({"gate_up": "colwise", "down": "colwise"}, "gives down the style 'colwise', and it cannot lie so: it gets "),
    ],
)
def test_plans_that_cannot_be(plan: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        trace(gated(), Grid(x=2, y=2), EXAMPLE, plan=plan)


def test_a_plan_and_sizes_that_do_not_divide() -> None:
    with pytest.raises(UserError, match="gives head the style 'colwise', and it cannot lie so"):
        trace(gated(), Grid(y=8), EXAMPLE, plan={"head": "colwise"})


def both() -> str:
    with pytest.raises(UserError) as error:
        cubeloom.parallelize(gated(), Network(Grid(y=2)), cut={"down": object()}, plan=GIVEN)  # type: ignore[dict-item]
    return str(error.value)


def test_a_cut_and_a_plan(ranks: RankPool) -> None:
    assert ranks.run(2, both) == ["a cut says how every layer lies: give it or a plan, not both"] * 2


class TwoRows(nn.Module):
    """Of its two lists the plan for pipelines names one."""

    def __init__(self, plan: dict[str, Any] | None) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self._pp_plan = plan


def test_the_plan_for_pipelines_names_the_row() -> None:
    assert units_of(TwoRows(None)).blocks == {
        f"{row}.{n}" for row, of in (("towers", 2), ("layers", 3)) for n in range(of)
    }
    named = units_of(TwoRows({"towers": (["x"], ["x"]), "missing": ([], []), "layers": ([], [])}))
    assert named.blocks == units_of(TwoRows(None)).blocks
    only = units_of(TwoRows({"layers": (["x"], ["x"])}))
    assert only.blocks == {"layers.0", "layers.1", "layers.2"}
