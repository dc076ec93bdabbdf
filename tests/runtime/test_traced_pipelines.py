"""Pipelines of models in which nobody has marked pieces: they train as the serial model does, bytes as predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import cubeloom
from compiling import without_kernels
from cubeloom import Grid, UserError
from cubeloom.comm import Network
from cubeloom.launch import RankPool
from cubeloom.models import skeleton
from cubeloom.models.named import named
from cubeloom.parallel import Batch, ShardingPolicy
from cubeloom.parallel.parameter import local_of
from cubeloom.parallel.traced import Row, Tracing
from cubeloom.pipeline import generate
from cubeloom.pipeline.runtime import Pipeline
from cubeloom.pipeline.runtime.microbatches import portions
from cubeloom.tools.verify import Experiment
from grids import rest_is_long
from parity import holds
from serial_runs import Verified

from . import own_models, regression
from .own_models import NanoGPT
from .test_recorded import CallAgain

pytestmark = pytest.mark.timeout(240)

OWN = own_models.__file__
REPLICATED = ShardingPolicy(activations="replicated")
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"vocab_size": 64, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
SHARED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
OLD: dict[str, Any] = {"n_embd": 16, "n_layer": 3, "n_head": 4, "vocab_size": 64, "n_positions": 32}
STILL: dict[str, Any] = {**OLD, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
IMAGES: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_labels": 8}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", SHARED),
    "Mistral": ("ForCausalLM", SHARED),
    "Qwen2": ("ForCausalLM", SHARED),
    "Qwen3": ("ForCausalLM", {**SHARED, "head_dim": 4, "tie_word_embeddings": True}),
    "Gemma2": ("ForCausalLM", {**SHARED, "head_dim": 4, "query_pre_attn_scalar": 4, "pad_token_id": 0}),
    "Olmo2": ("ForCausalLM", SHARED),
    "GPTNeoX": ("ForCausalLM", SIZES),
    "GPT2": ("LMHeadModel", OLD),
    "GPTJ": ("ForCausalLM", {**OLD, "rotary_dim": 4}),
    "Falcon": ("ForCausalLM", {**SIZES, "multi_query": False, "bias": False}),
    "Bert": ("ForMaskedLM", {**SIZES, "pad_token_id": 0}),
    "ViT": ("ForImageClassification", {**SIZES, **IMAGES}),
    "T5": (
        "ForConditionalGeneration",
        {
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 24,
            "num_layers": 3,
            "num_heads": 4,
            "vocab_size": 64,
            "decoder_start_token_id": 0,
        },
    ),
}


def own(function: str) -> str:
    return f"{OWN}:{function}"


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Folders of Hugging Face's, without weights."""
    import transformers

    def folder(family: str) -> str:
        made = tmp_path_factory.mktemp(family)
        ending, sizes = THEIRS[family]
        config = getattr(transformers, f"{family}Config")(architectures=[f"{family}{ending}"], **sizes)
        config.save_pretrained(made)
        return str(made)

    return folder


def trains(verified: Verified, model: str, grid: str, family: str, microbatches: int = 4, **changes: Any) -> None:
    on = Grid.parse(grid)
    schedule = generate(family, on.pipe, microbatches)
    batch = Batch(len(portions(schedule)) * on.data * on.z * changes.get("ways", 1), 12)
    source = named(model)
    steps = changes.pop("steps", 2)
    holds(
        verified(
            Experiment(model=source, grid=on, batch=batch, rest=REPLICATED, schedule=schedule, steps=steps, **changes)
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "grid", "schedule"),
    rest_is_long(
        [
            ("nano", "pipe=2,y=2", "chimera-zb"),
            ("nano", "pipe=2,data=2", "interleaved"),
            ("nano", "pipe=2,z=2,x=2", "1f1b"),
            ("skipping", "pipe=4", "1f1b"),
            ("skipping", "pipe=2,data=2,x=2", "chimera"),
            ("nano", "pipe=2", "pipedream-2bw"),
            ("plain", "pipe=2,x=2", "1f1b"),
        ],
        [("nano", "pipe=2,y=2", "chimera-zb"), ("skipping", "pipe=4", "1f1b")],
    ),
)
def test_a_users_own_model_trains_as_it_does_serially(
    verified: Verified, function: str, grid: str, schedule: str
) -> None:
    trains(verified, own(function), grid, schedule)


@pytest.mark.slow
def test_a_loss_that_is_a_mean_over_samples(verified: Verified) -> None:
    trains(verified, f"{regression.FILE}:Regression", "pipe=2,data=2", "1f1b")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "schedule"), [("Llama", "1f1b")])
def test_a_model_of_hugging_face_trains_as_it_does_serially(
    verified: Verified, theirs: Callable[[str], str], family: str, schedule: str
) -> None:
    trains(verified, theirs(family), "pipe=2,y=2", schedule, steps=1)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "chimera", "chimera-zb", "interleaved"])
@pytest.mark.parametrize("family", THEIRS)
def test_models_of_hugging_face_train_as_they_do_serially(
    verified: Verified, theirs: Callable[[str], str], family: str, schedule: str
) -> None:
    trains(verified, theirs(family), "pipe=2,y=2", schedule)


@pytest.mark.long
@pytest.mark.parametrize("changes", [{"recompute": True}, {"zero": True}], ids=str)
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_recomputation_and_sharded_optimizers(
    verified: Verified, theirs: Callable[[str], str], family: str, changes: dict[str, Any]
) -> None:
    trains(verified, theirs(family), "pipe=2,data=2", "chimera-zb", **changes)


@pytest.mark.parametrize(
    ("family", "grid"),
    rest_is_long(
        [(family, grid) for family in ("Llama", "GPT2", "Bert", "T5") for grid in ("pipe=2,y=2", "pipe=2,z=2")],
        [],
    ),
)
@pytest.mark.parametrize("changes", [{}, {"recompute": True}, {"compile": True}], ids=str)
def test_stages_in_strands(
    verified: Verified,
    ranks: RankPool,
    theirs: Callable[[str], str],
    family: str,
    grid: str,
    changes: dict[str, Any],
) -> None:
    ranks.run(Grid.parse(grid).world, without_kernels)
    trains(verified, theirs(family), grid, "chimera-zb", ways=2, steps=1, **changes)


@pytest.mark.long
def test_stages_in_strands_and_compiled(verified: Verified, ranks: RankPool) -> None:
    """Positions and the embedding go along with the stream: the first are the same for all strands."""
    ranks.run(4, without_kernels)
    trains(verified, own("skipping"), "pipe=2,y=2", "1f1b", 2, ways=2, compile=True, steps=1)


def recorded(folder: str, grid: Grid, family: str) -> float:
    """How far losses of recorded steps are from those of others."""
    found = []
    for record in (None, CallAgain()):
        mesh, source = Network(grid), named(folder)
        model, batch = skeleton(source), Batch(12, 8)
        fill = source.fill(model, 0, torch.float64, mesh.device)
        schedule = generate(family, grid.pipe, 3)
        made = Pipeline(model, source.cut(model), mesh, batch, fill, schedule, REPLICATED, record=record)
        if record is not None:
            record.gradients = made.gradients
        losses = []
        for step in range(3):
            losses.append(made.step(mesh.shard(source.samples(batch, 0, step, torch.float64))))
            for each in made.parameters.values():
                assert each.grad is not None
                local_of(each).sub_(local_of(each.grad), alpha=0.5)
                each.grad = None
        found.append(losses)
        assert record is None or record.slots
    return max(abs(one - other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("family", "grid", "schedule"),
    rest_is_long([("GPT2", "pipe=2,y=2", "1f1b"), ("T5", "pipe=2", "zb-h1")], [("GPT2", "pipe=2,y=2", "1f1b")]),
)
def test_recorded_stages(ranks: RankPool, theirs: Callable[[str], str], family: str, grid: str, schedule: str) -> None:
    where = Grid.parse(grid)
    assert max(ranks.run(where.world, recorded, theirs(family), where, schedule)) <= 1e-12


def row_of(function: str, grid: Grid | None = None) -> Row:
    source = named(own(function))
    model = skeleton(source)
    cut = source.cut(model)
    assert isinstance(cut, Tracing)
    return cut.row(model, grid or Grid(pipe=2), Batch(4, 12))


def test_a_row_is_cut_before_each_block_and_behind_the_last() -> None:
    row = row_of("nano", Grid(pipe=2, x=2))
    blocks = [(f"transformer.h.{number}",) for number in range(3)]
    assert row.modules == (("transformer.wte", "transformer.wpe"), *blocks, ("transformer.ln_f", "lm_head"))
    handed = [row.block_outputs(piece) for piece in range(4)]
    assert [list(each) for each in handed] == [
        ["@0"],
        ["transformer.h.0@2.0"],
        ["transformer.h.1@3.0"],
        ["transformer.h.2@4.0"],
    ]
    # Of a sample of 12 tokens each rank of x has half of the features.
    assert {(each.numbers, each.of_samples) for some in handed for each in some.values()} == {(12 * 16 // 2, True)}


def test_a_layer_without_parameters_has_a_stage() -> None:
    assert row_of("plain", Grid(pipe=2, x=2)).modules[-1] == ("transformer.ln_f", "lm_head")


def test_what_later_blocks_use_travels_with_the_stream() -> None:
    row = row_of("skipping")
    embedding = ["transformer.wpe@1.0", "transformer.wte@0.0"]
    assert [sorted(row.block_outputs(piece)) for piece in range(4)] == [
        ["@0", *embedding],
        [*sorted(["transformer.h.0@2.0"]), *embedding],
        ["transformer.h.0@2.0", "transformer.h.1@3.0", *embedding],
        ["transformer.h.0@2.0", "transformer.h.2@4.0"],
    ]
    # Positions are the same for all samples.
    assert row.block_outputs(1)["transformer.wpe@1.0"].of_samples is False


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("reading", "parameters of the model itself are used in several places"),
        ("repeating", "transformer.h.0 is called 2 times in a forward"),
    ],
)
def test_what_cannot_be_cut_apart_is_one_piece(function: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        Experiment(
            model=named(own(function)),
            grid=Grid(pipe=4),
            batch=Batch(8, 12),
            rest=REPLICATED,
            schedule=generate("1f1b", 4, 8),
        ).specs()


def test_samples_that_see_one_another_are_refused() -> None:
    with pytest.raises(UserError, match=r"micro-batches cut samples.*mean over dimension 0"):
        row_of("mixing")


def test_a_model_without_a_row_is_refused() -> None:
    model = nn.Linear(4, 4)
    cut = Tracing(lambda _: {"input": torch.zeros(2, 4)})
    with pytest.raises(UserError, match="Linear has no row of blocks"):
        cut.row(model, Grid(pipe=2), Batch(4, 1))


def some_batch(tokens: int = 12) -> dict[str, Tensor]:
    """Of which the first samples have fewer targets that count."""
    generator = torch.Generator().manual_seed(3)
    idx = torch.randint(0, own_models.VOCABULARY, (8, tokens), generator=generator)
    targets = idx.roll(-1, 1)
    targets[:3, :5] = -1
    return {"idx": idx, "targets": targets}


def nano() -> NanoGPT:
    torch.manual_seed(0)
    return NanoGPT().double()


def updated(model: nn.Module, loss: Callable[[Mapping[str, Tensor]], Tensor], clip: Any) -> list[float]:
    """Losses and norms of steps on batches of two lengths, of two passes each."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), list[float]()
    for tokens in (12, 7):
        found += [loss(some_batch(tokens)).item() for _ in range(2)]
        found.append(clip(model, 1e3).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def mesh_of(grid: Grid) -> Network:
    return cubeloom.init(pipe=grid.pipe, data=grid.data, z=grid.z, y=grid.y)


def in_stages(grid: Grid, folder: Path) -> tuple[list[float], list[float]]:
    mesh = mesh_of(grid)
    pipe = cubeloom.pipeline(nano(), mesh, schedule="chimera", microbatches=4)
    found = updated(pipe, lambda batch: pipe.step(mesh.shard(batch)), cubeloom.clip_grad_norm_)
    cubeloom.save(pipe, folder)
    batch = mesh.shard(some_batch())
    with torch.device("meta"):
        empty = NanoGPT().double()
    again = cubeloom.pipeline(empty, mesh, schedule="1f1b", microbatches=2, recompute=True)
    cubeloom.load(again, folder)
    return found, [pipe.evaluate(batch), again.evaluate(batch), again.step(batch).item()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "grid", rest_is_long([Grid(pipe=2, y=2), Grid(pipe=2, data=2), Grid(pipe=2, z=2)], [Grid(pipe=2, data=2)]), ids=str
)
def test_a_loop_of_the_users_own(ranks: RankPool, tmp_path: Path, grid: Grid) -> None:
    def backward(batch: Mapping[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch)
        loss.backward()
        return loss

    model = nano()
    expected = updated(model, backward, lambda each, most: nn.utils.clip_grad_norm_(each.parameters(), most))
    last = model(**some_batch()).item()
    for found, after in ranks.run(4, in_stages, grid, tmp_path):
        assert found == pytest.approx(expected, rel=1e-12)
        assert after == pytest.approx([last] * 3, rel=1e-12)


def refusals(grid: Grid) -> list[str]:
    mesh, model = mesh_of(grid), nano()
    with torch.device("meta"):
        without_values = NanoGPT()
    empty = cubeloom.pipeline(without_values, mesh)
    pipe, batch = cubeloom.pipeline(model, mesh), some_batch()
    tries: list[Callable[[], object]] = [
        lambda: cubeloom.pipeline(model, mesh, "pipedream", 4),
        lambda: cubeloom.pipeline(model, mesh, recompute="attention"),
        lambda: empty.step(batch),
        lambda: pipe.step({name: each[:6] for name, each in batch.items()}),
        lambda: pipe.step({"tokens": batch["idx"]}),
        lambda: pipe(**batch),
        lambda: cubeloom.parallelize(model, mesh),
    ]
    found = []
    for each in tries:
        with pytest.raises(UserError) as raised:
            each()
        found.append(str(raised.value))
    return found


def test_wrong_use_is_refused(ranks: RankPool) -> None:
    words = [
        "pipedream updates weights within a step",
        "attention alone cannot be recomputed",
        "has no values yet: call cubeloom.load",
        "6 samples of a rank cannot be cut into 4 micro-batches",
        "the batch has 'tokens'",
        "call its step",
        "use cubeloom.pipeline",
    ]
    for found in ranks.run(2, refusals, Grid(pipe=2)):
        assert all(word in text for word, text in zip(words, found, strict=True)), found


def exported(grid: Grid, start: Path, folder: Path) -> None:
    import transformers

    mesh = mesh_of(grid)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_pretrained(start))
    pipe = cubeloom.pipeline(model, mesh, microbatches=2)
    cubeloom.load(pipe, start)
    cubeloom.save_pretrained(pipe, folder)


@pytest.mark.slow
def test_what_is_exported_is_what_was_loaded_to_the_bit(ranks: RankPool, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**STILL, bos_token_id=1, eos_token_id=2))
    model.save_pretrained(tmp_path / "first")
    ranks.run(4, exported, Grid(pipe=2, y=2), tmp_path / "first", tmp_path / "second")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
