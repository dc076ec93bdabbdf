"""What a rank would compute otherwise than the serial model is refused, with operation, file and line; what is right is not."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import BATCH, CUT, IMAGE_CUT, Code, Images, Transformer, difference, on, without_values
from torch import Tensor, nn
from wrong_code import IMAGE_RIGHT, IMAGE_WRONG, KEPT, RIGHT, WRONG, Piece

from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import build, cut_of
from cubeloom.parallel import Batch, Cut, CutError, ShardingPolicy, resolve
from cubeloom.parallel import layers as declared
from cubeloom.parallel.check import Given
from cubeloom.parallel.layers import Contract, Expand, Loss, Norm
from cubeloom.parallel.layers.declared import Declared
from cubeloom.parallel.layout import Layout
from grids import RESTS, SAMPLE, SAMPLE_WITH_DATA, rest_is_long

CUTS: dict[type[nn.Module], Cut] = {Transformer: CUT, Images: IMAGE_CUT}
PIECES: dict[type[nn.Module], Mapping[str, Piece]] = {
    Transformer: {**WRONG, **{f"right: {name}": piece for name, piece in RIGHT.items()}},
    Images: {**IMAGE_WRONG, **{f"right: {name}": piece for name, piece in IMAGE_RIGHT.items()}},
}
LINE = re.compile(r"(^|\s|, )[\w./]+\.py:\d+(:| )")


def code_of(kind: type[nn.Module], name: str) -> dict[str, Code]:
    piece = PIECES[kind][name]
    return {piece.place: piece.code}


def refusal(kind: type[nn.Module], cut: Cut, grid: str, rest: Any = "sharded", **code: Code) -> str | None:
    """Why a cut model is refused; None where it is not."""
    KEPT.clear()
    try:
        resolve(without_values(kind, code), cut, on(grid), ShardingPolicy(activations=rest), BATCH)
    except CutError as error:
        return str(error)
    return None


# --- code between layers ---

ALL = [(kind, name) for kind, pieces in PIECES.items() for name in pieces]
WRONG_ONES = [(kind, name) for kind, name in ALL if not name.startswith("right: ")]


@pytest.mark.parametrize(("kind", "name"), WRONG_ONES, ids=lambda each: each if isinstance(each, str) else "")
def test_wrong_code_is_refused_with_its_line(kind: type[nn.Module], name: str) -> None:
    piece = PIECES[kind][name]
    found = refusal(kind, CUTS[kind], piece.grid, **code_of(kind, name))
    assert found is not None and piece.says in found and LINE.search(found), found


def differences(
    kind: type[nn.Module], names: list[str], grid: str, rest: Any, unchecked: bool
) -> dict[str, float | str]:
    """Of models with these pieces of code from the serial one; or the error that a rank meets."""
    network, found = Network(on(grid)), dict[str, float | str]()
    for name in names:
        KEPT.clear()
        code = code_of(kind, name)
        found[name] = difference(kind, CUTS[kind], code, network, ShardingPolicy(activations=rest), unchecked)
    return found


@pytest.mark.parametrize("kind", [pytest.param(Transformer, marks=pytest.mark.long), Images])
def test_without_the_check_wrong_code_trains_otherwise(kind: type[nn.Module], ranks: RankPool) -> None:
    wrong = {name: piece for name, piece in PIECES[kind].items() if piece.trains}
    assert len(wrong) >= 5
    for grid in sorted({piece.grid for piece in wrong.values()}):
        names = [name for name, piece in wrong.items() if piece.grid == grid]
        for rank in ranks.run(on(grid).world, differences, kind, names, grid, "sharded", True):
            assert {name: each for name, each in rank.items() if not each > 1e-6} == {}


@pytest.mark.parametrize(
    ("grid", "rest"),
    rest_is_long(
        product(["x=2,y=2", "data=2,z=2", "x=2", "y=2"], RESTS),
        [("x=2,y=2", "sharded")],
    ),
)
@pytest.mark.parametrize("kind", [Transformer, Images])
def test_whatever_code_is_accepted_trains_as_the_serial_model(
    kind: type[nn.Module], grid: str, rest: str, ranks: RankPool
) -> None:
    accepted = [name for name in PIECES[kind] if refusal(kind, CUTS[kind], grid, rest, **code_of(kind, name)) is None]
    by_rows = {"right: rows by a mask"} if grid in ("x=2,y=2", "y=2") and rest == "sharded" else set()
    assert {name for _, name in ALL if name.startswith("right: ") and name in PIECES[kind]} - by_rows <= set(accepted)
    for rank in ranks.run(on(grid).world, differences, kind, accepted, grid, rest, False):
        assert {name: each for name, each in rank.items() if not each <= 1e-10} == {}


# --- cuts ---

KINDS = list(
    dict.fromkeys([*CUT.values(), *IMAGE_CUT.values(), Expand(turn=True), Contract(turn=True), Loss(whole=True)])
)
EXCHANGES = [
    (kind, layer, other) for kind, cut in CUTS.items() for layer in cut for other in KINDS if cut[layer] != other
]


def exchanged(kind: type[nn.Module], layer: str, other: Declared) -> Cut:
    return {**CUTS[kind], layer: other}


def of_exchanges(grid: str, rest: Any, chosen: list[tuple[type[nn.Module], str, Declared]]) -> list[float]:
    network = Network(on(grid))
    settings = ShardingPolicy(activations=rest)
    return [difference(kind, exchanged(kind, layer, other), {}, network, settings) for kind, layer, other in chosen]


@pytest.mark.parametrize(
    ("grid", "rest"),
    rest_is_long(
        product(["x=2,y=2", "x=2", "y=2", "z=2"], RESTS),
        [("x=2,y=2", "sharded")],
    ),
)
def test_a_layer_of_another_kind_is_refused_or_computes_the_same(grid: str, rest: str, ranks: RankPool) -> None:
    """On a single axis many kinds are one; on two an Expand can have sharded outputs where they are sharded anyway."""
    found = {case: refusal(case[0], exchanged(*case), grid, rest) for case in EXCHANGES}
    accepted = [case for case, said in found.items() if said is None]
    for rank in ranks.run(on(grid).world, of_exchanges, grid, rest, accepted):
        assert [(case, each) for case, each in zip(accepted, rank, strict=True) if not each <= 1e-10] == []
    if grid == "x=2,y=2":
        assert len(found) - len(accepted) > 400
        assert all(isinstance(kind, declared.Table | declared.Embedding | Expand) for _, _, kind in accepted), accepted
        # All but those that the sizes of the grid refuse already say where the layer is called.
        by_size = re.compile(r"cannot be cut|can take it as Grouped|cannot be cut by heads")
        assert [said for said in found.values() if said and not LINE.search(said) and not by_size.search(said)] == []


def test_layers_of_a_transformer_exchanged_in_pairs() -> None:
    for first in CUT:
        for second in CUT:
            if CUT[first] != CUT[second]:
                said = refusal(Transformer, {**CUT, first: CUT[second], second: CUT[first]}, "x=2,y=2")
                # A table for an embedding is right, and sharded outputs where they are sharded anyway: see above.
                assert (said is None) == ({first, second} in ({"embed", "positions"}, {"up", "head"})), (first, second)
                assert said is None or LINE.search(said), said


@pytest.mark.parametrize(("kind", "layer"), [(kind, layer) for kind, cut in CUTS.items() for layer in cut])
def test_every_layer_that_is_left_out_is_named_with_its_line(kind: type[nn.Module], layer: str) -> None:
    cut = {name: each for name, each in CUTS[kind].items() if name != layer}
    said = refusal(kind, cut, "x=2,y=2")
    assert said is not None and LINE.search(said), said


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"up": Expand(turn=True)}, "layer down (Linear), Contract() in the cut, takes features cut over y"),
        ({"down": Contract(turn=True)}, "dimension 0 is cut over y in one and cut over x in the other"),
        ({"up": Expand(turn=True), "down": Expand()}, "dimension 0 is cut over y in one and cut over x in the other"),
        ({"up": Expand(), "down": Expand()}, "takes features cut over x, and gets features cut over y from layer up"),
        ({"up": Contract(), "down": Contract()}, "Expand() takes features from x"),
        (
            {"up": Contract(), "down": Expand()},
            "takes features cut over y, and gets features cut over x from layer norm2",
        ),
        ({"qkv": Expand(heads=2)}, "layer proj"),
        ({"qkv": Expand()}, "layer proj"),
        ({"proj": Contract()}, "takes features cut over y, and gets features cut over y·x"),
        ({"loss": Loss(whole=True)}, "takes features whole, and gets features cut over y"),
        ({"norm": Norm(side="y")}, "cannot take as Norm(side='y')"),
    ],
)
def test_expands_contracts_and_turns(changes: dict[str, Declared], says: str) -> None:
    said = refusal(Transformer, CUT | changes, "x=2,y=2")
    assert said is not None and says in said and LINE.search(said), said


@pytest.mark.parametrize(
    ("changes", "grid"),
    [
        ({"up": Expand(turn=True), "down": Expand(turn=True)}, "x=2,y=2"),
        ({"up": Expand(heads=4), "down": Contract(heads=4)}, "x=2,y=2"),
        ({"up": Expand(sharded_output=True)}, "x=2,y=2"),
    ],
)
def test_other_cuts_that_are_right(changes: dict[str, Declared], grid: str, ranks: RankPool) -> None:
    assert refusal(Transformer, CUT | changes, grid) is None
    cut = CUT | changes
    assert max(ranks.run(on(grid).world, of_cut, cut, grid)) <= 1e-10


def of_cut(cut: Cut, grid: str) -> float:
    return difference(Transformer, cut, {}, Network(on(grid)), ShardingPolicy())


def test_a_head_whose_rows_rest_replicated() -> None:
    said = refusal(Transformer, CUT | {"head": Expand()}, "x=2,y=2", "replicated")
    assert said is not None and "Its logits come from a layer with Expand(sharded_output=True)" in said


# --- what layers are replaced for ---


class Focal(nn.Module):
    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(logits, targets, reduction="none")
        return ((1 - (-losses).exp()) ** 2 * losses).mean()


class OfLogits(nn.Module):
    """A cross-entropy by hand."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.nll_loss(logits.double().log_softmax(-1), targets).to(logits.dtype)


def test_a_loss_must_be_the_one_that_the_cut_names() -> None:
    model = without_values(Transformer, {})
    model.loss = Focal()
    with pytest.raises(CutError, match=r"layer loss \(Focal\) is taken for one that gives the mean cross-entropy"):
        resolve(model, CUT, on("x=2"), ShardingPolicy(), BATCH)
    model.loss = OfLogits()
    resolve(model, CUT, on("x=2"), ShardingPolicy(), BATCH)


class AnotherOrder(nn.GroupNorm):
    """As if features were not in turns."""


def test_a_norm_of_joined_features_must_have_their_groups() -> None:
    with torch.device("meta"):
        model = build("unet-tiny")
    cut = cut_of(model)
    resolve(model, cut, on("x=2"), ShardingPolicy(), BATCH)
    name, norm = next((name, each) for name, each in model.named_modules() if type(each).__name__ == "NormInTurns")
    norm.__class__ = AnotherOrder
    with pytest.raises(CutError, match=rf"layer {name} \(AnotherOrder\) is taken for one that gives a group norm"):
        resolve(model, cut, on("x=2"), ShardingPolicy(), BATCH)


def test_a_function_of_whole_features_is_one_of_each_number() -> None:
    model = without_values(Images, {})
    model.shared = nn.SiLU()
    resolve(model, IMAGE_CUT, on("x=2,y=2"), ShardingPolicy(), BATCH)
    model.shared = nn.Softmax(-1)
    with pytest.raises(
        CutError, match=r"layer shared \(Softmax\) is taken for one that gives a function of each number"
    ):
        resolve(model, IMAGE_CUT, on("x=2,y=2"), ShardingPolicy(), BATCH)


def test_a_layer_in_two_places_is_refused() -> None:
    model = without_values(Transformer, {})
    model.norm2 = model.norm
    cut = {name: kind for name, kind in CUT.items() if name != "norm"}
    with pytest.raises(CutError, match=r"layer norm2 \(LayerNorm\) is norm as well, and only one of them would be cut"):
        resolve(model, cut, on("x=2"), ShardingPolicy(), BATCH)


# --- what a model is run with ---


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, rows: Tensor, scale: float = 1.0) -> Tensor:
        found: Tensor = self.down(torch.relu(self.up(rows))) * scale
        return found


ROWS: Cut = {"up": Expand(), "down": Contract()}


def test_a_model_of_another_signature_needs_an_example() -> None:
    def resolved(example: Callable[[int], Mapping[str, Any]] | None) -> None:
        resolve(without_values(Rows, {}), ROWS, on("x=2,y=2"), ShardingPolicy(), BATCH, example)

    with pytest.raises(
        CutError, match=r"Rows.forward takes rows, scale, of which no example is known.*'rows': torch.empty"
    ):
        resolved(None)
    with pytest.raises(CutError, match="takes features cut over x, and gets features whole"):
        resolved(lambda samples: {"rows": torch.empty(samples, 8)})
    laid = Layout.of(rows=("data", "z", "y"), features="x")
    resolved(lambda samples: {"rows": Given(torch.empty(samples, 8), laid), "scale": 2.0})
    with pytest.raises(CutError, match="the example's rows has 3 dimensions, and its layout is"):
        resolved(lambda samples: {"rows": Given(torch.empty(samples, 2, 8), laid)})


def test_whoever_answers_for_a_model_need_not_have_it_checked() -> None:
    resolve(without_values(Rows, {}), ROWS, on("x=2,y=2"), ShardingPolicy(), BATCH, unchecked=True)


def test_three_dimensions_do_not_turn() -> None:
    """A turn exchanges dimensions 0 and 1, which in `[samples, sequence, features]` are not those that are meant."""
    laid = Layout.of(rows=("data", "z", "y"), sequence=None, features="x")
    cut: Cut = {"up": Expand(turn=True), "down": Expand()}
    with pytest.raises(CutError, match=r"turns \[rows, features\], and gets 3 dimensions"):
        resolve(
            without_values(Rows, {}),
            cut,
            on("x=2,y=2"),
            ShardingPolicy(),
            BATCH,
            lambda samples: {"rows": Given(torch.empty(samples, 4, 8), laid)},
        )


def test_the_check_leaves_a_model_as_it_was() -> None:
    model = without_values(Transformer, {"stream": remembering})
    model.calls = 0
    before = [dict(vars(module)) for module in model.modules()]
    resolve(model, CUT, on("x=2,y=2"), ShardingPolicy(), BATCH)
    assert [dict(vars(module)) for module in model.modules()] == before


def remembering(x: Tensor, _: Tensor, model: Any) -> Tensor:
    model.calls += 1
    model.last = x
    return x


def test_the_page_shows_what_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "cube.md").read_text()
    found = re.search(r"## What is checked.*?```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert found is not None
    file = tmp_path / "my_model.py"
    file.write_text(found[1])
    runpy.run_path(str(file))
    assert capsys.readouterr().out == found[2]


# --- the models of the house ---

PRESETS = ["gpt-tiny", "llama-tiny", "bert-tiny", "unet-tiny", "resnet-tiny"]


@pytest.mark.parametrize("preset", rest_is_long(PRESETS, [each for each in PRESETS if each != "unet-tiny"]))
def test_presets_are_accepted(preset: str) -> None:
    with torch.device("meta"):
        model = build(preset)
    for grid in (*SAMPLE, *SAMPLE_WITH_DATA):
        samples = 2 * on(grid).world
        for rest in RESTS:
            resolve(model, cut_of(model), on(grid), ShardingPolicy(activations=rest), Batch(samples, 24))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("preset", "grid"), [("gpt-175b", "x=12,y=8"), ("llama-70b", "y=8,z=4"), ("unet-28b", "x=4,y=8")]
)
def test_large_presets_are_accepted(preset: str, grid: str) -> None:
    with torch.device("meta"):
        model = build(preset)
    resolve(model, cut_of(model), on(grid), ShardingPolicy(), Batch(2 * on(grid).world, 64))
