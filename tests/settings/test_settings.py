"""Settings: what a file says, what it extends, what overrides it, and how mistakes are answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubeloom import UserError
from cubeloom.base.settings import load, write


@dataclass(frozen=True)
class Optimizer:
    rate: float = 1e-3
    kind: Literal["adamw", "sgd"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True)
class Run:
    model: str
    steps: int = 10
    optimizer: Optimizer = field(default_factory=Optimizer)
    out: Path | None = None
    stages: tuple[int, ...] = ()
    exact: bool = False


@pytest.fixture
def put(tmp_path: Path) -> Any:
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


def test_a_file_with_sections(put: Any) -> None:
    file = put("run.toml", 'model = "gpt"\nout = "here"\nstages = [1, 2]\n[optimizer]\nrate = 1\nkind = "sgd"\n')
    assert load(Run, file) == Run("gpt", out=Path("here"), stages=(1, 2), optimizer=Optimizer(rate=1.0, kind="sgd"))


def test_a_file_says_what_is_different_from_another(put: Any) -> None:
    put("base.toml", 'model = "gpt"\nsteps = 5\n[optimizer]\nrate = 0.5\nkind = "sgd"\n')
    put("middle.toml", 'extends = "base.toml"\nsteps = 6\n')
    file = put("run.toml", 'extends = "middle.toml"\n[optimizer]\nrate = 0.25\n')
    assert load(Run, file) == Run("gpt", 6, Optimizer(rate=0.25, kind="sgd"))


def test_overrides_come_last(put: Any) -> None:
    file = put("run.toml", 'model = "gpt"\n')
    found = load(Run, file, ["--steps=7", "optimizer.betas=[0.5, 0.5]", "model=llama", "exact=true"])
    assert found == Run("llama", 7, Optimizer(betas=(0.5, 0.5)), exact=True)


def test_a_recipe_in_python(put: Any) -> None:
    file = put("run.py", 'settings = {"model": "gpt", "steps": 2 * 21, "optimizer": {"kind": "sgd"}}\n')
    assert load(Run, file, ["exact=true"]) == Run("gpt", 42, Optimizer(kind="sgd"), exact=True)


def test_a_recipe_in_python_may_use_paths_and_sections(put: Any) -> None:
    recipe = "from pathlib import Path\nfrom {} import Optimizer\nsettings = {}\n"
    values = '{"model": "gpt", "out": Path("here"), "optimizer": Optimizer(kind="sgd")}'
    file = put("run.py", recipe.format(__name__, values))
    assert load(Run, file, ["optimizer.rate=0.5"]) == Run("gpt", optimizer=Optimizer(0.5, "sgd"), out=Path("here"))
    unset = put("unset.py", 'settings = {"model": "gpt", "out": None}\n')
    assert load(Run, unset) == Run("gpt")
    with pytest.raises(UserError, match="steps = None should be a whole number"):
        load(Run, put("none.py", 'settings = {"model": "gpt", "steps": None}\n'))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('model = "gpt"\nstpes = 3', "unknown setting stpes; did you mean 'steps'? There are model, steps, optimizer"),
        ('model = "gpt"\nqq = 3', "unknown setting qq. There are model"),
        ('model = "gpt"\n[optimizer]\nrat = 3', "unknown setting optimizer.rat; did you mean 'rate'?"),
        ("steps = 3", "model is not set, and has no default"),
        ('model = "gpt"\nsteps = "ten"', "steps = 'ten' should be a whole number"),
        ('model = "gpt"\nsteps = true', "steps = True should be a whole number"),
        ('model = "gpt"\nexact = 1', "exact = 1 should be true or false"),
        (
            'model = "gpt"\n[optimizer]\nkind = "adam"',
            "optimizer.kind = 'adam' is none of adamw, sgd; did you mean 'adamw'?",
        ),
        ('model = "gpt"\n[optimizer]\nbetas = [1]', "optimizer.betas = [1] should have 2 entries"),
        ('model = "gpt"\n[optimizer]\nbetas = [1, "x"]', "optimizer.betas[1] = 'x' should be a number"),
        ('model = "gpt"\nstages = 3', "stages = 3 should be a list"),
        ('model = "gpt"\noptimizer = 3', "optimizer is a section of settings, and got 3"),
        ('model = "gpt"\n[optimizer]\nrate = inf', "optimizer.rate = inf is not a finite number"),
        ('model = "gpt"\n[optimizer]\nbetas = [0.5, nan]', "optimizer.betas[1] = nan is not a finite number"),
        ('model = "gpt"\nsteps = 9223372036854775808', "steps = 9223372036854775808 does not fit into 64 bits"),
        ("model = ", "is not TOML"),
        ('extends = "nowhere.toml"', "no settings at"),
        ('extends = "run.toml"', "in a circle: run.toml -> run.toml"),
        ("extends = 3", "should be the name of a file"),
    ],
)
def test_a_mistake_is_one_clear_sentence(put: Any, text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load(Run, put("run.toml", text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@dataclass(frozen=True)
class Named:
    ALIKE: ClassVar = ("name", "preset")
    name: str = "none"
    preset: str = "none"
    size: int = 1


@dataclass(frozen=True)
class WithNamed:
    model: Named = field(default_factory=Named)


def test_of_settings_that_say_the_same_the_later_counts(put: Any) -> None:
    put("base.toml", '[model]\npreset = "a"\nsize = 3')
    file = put("run.toml", 'extends = "base.toml"\n[model]\nname = "b"')
    assert load(WithNamed, file).model == Named("b", "none", 3)
    assert load(WithNamed, file, ["model.preset=c"]).model == Named("none", "c", 3)
    assert load(WithNamed, file, ["model.size=4"]).model == Named("b", "none", 4)


def test_other_mistakes(put: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no settings at"):
        load(Run, tmp_path / "none.toml")
    with pytest.raises(UserError, match=r"an override reads a\.b=c"):
        load(Run, put("run.toml", 'model = "gpt"'), ["steps"])
    with pytest.raises(UserError, match="failed: ZeroDivisionError"):
        load(Run, put("run.py", "1 / 0"))
    with pytest.raises(UserError, match="does not set `settings`"):
        load(Run, put("run.py", "x = 1"))


def test_any_text_can_be_written(tmp_path: Path) -> None:
    text = '\x7f \x00 " \\ \u2028 \U0001f600 \n'
    (tmp_path / "run.toml").write_text(write(Run(text)))
    assert load(Run, tmp_path / "run.toml").model == text


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        Run,
        st.text(st.characters(codec="utf-8"), max_size=8),
        st.integers(-(2**60), 2**60),
        st.builds(Optimizer, st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["adamw", "sgd"])),
        st.none() | st.just(Path("a/b")),
        st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3).map(tuple),
        st.booleans(),
    )
)
def test_what_is_written_loads_as_an_equal_value(tmp_path_factory: pytest.TempPathFactory, run: Run) -> None:
    file = tmp_path_factory.mktemp("written") / "run.toml"
    file.write_text(write(run))
    assert load(Run, file) == run


@dataclass(frozen=True)
class Batch:
    samples: int
    sequence: int


@dataclass(frozen=True)
class Whole:
    batch: Batch = field(default_factory=lambda: Batch(8, 64))


def test_a_part_of_a_section_keeps_the_owners_other_defaults(put: Any) -> None:
    assert load(Whole, put("run.toml", "[batch]\nsequence = 32\n")).batch == Batch(8, 32)
