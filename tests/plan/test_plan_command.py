"""`cubeloom plan`: its table, its JSON, its files and its refusals."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cubeloom import Grid
from cubeloom.base.errors import UserError
from cubeloom.base.settings import load, write
from cubeloom.base.settings.convert import convert
from cubeloom.cli.launch import Slurm
from cubeloom.cli.plan import Plan
from cubeloom.plan.search import different, search, usual
from cubeloom.train.job import Job
from pages.data import Page

FIELDS = {
    "grid", "schedule", "microbatches", "microbatch", "rest", "ways", "recompute", "step_s", "mfu", "memory_gb", "bytes",
    "bubble", "exposed_s",
}  # fmt: skip


def command(**options: Any) -> Plan:
    return Plan(**{"model": "gpt-tiny", "cluster": "perlmutter", "devices": 8, "global_batch": 16, **options})


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(json=True, top=3)() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == {"considered", "seconds", "plans", "refused"}
    assert len(found["plans"]) == 3 and found["considered"] > sum(found["refused"].values())
    for plan in found["plans"]:
        assert set(plan) >= FIELDS
        assert 0 < plan["mfu"] < 1 and plan["step_s"] > 0 and 0 <= plan["bubble"] < 1
    assert found["plans"][0]["step_s"] <= found["plans"][1]["step_s"]


@pytest.mark.slow
def test_the_answer_is_one_sentence_then_strategies_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(model="gpt-5b", devices=64, global_batch=256, cluster="dgx-h100")() == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    first = out[: out.index("\n\n")].replace("\n", " ")
    assert re.fullmatch(
        r"\S+ under .+ is fastest: [\d.]+ m?s a step \(.+ to .+\), .+ tokens/s, MFU .+ GB a device\.", first
    )
    assert re.search(r"grid +schedule +step +MFU +memory", out)
    for name in ("FSDP", "HSDP", "Megatron-LM, sequence parallel", "Megatron-LM", "1F1B and data parallel"):
        assert any(line.strip().startswith(name) for line in lines), name
    assert re.search(r"\+[\d.]+%: [\d.e-]+ s (more|less)", out)
    assert "memory of the first" in out and "received by rank 0" in out and "refused:" in out


def test_so_many_of_the_best_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(top=2)() == 0
    out = capsys.readouterr().out
    assert "\n 2 " in out and "\n 3 " not in out and "FSDP" not in out


@pytest.mark.slow
def test_strategies_differ_and_the_usual_ones_are_what_they_are_called() -> None:
    answer = search("gpt-5b", "dgx-h100", 64, 256)
    some = different(answer)
    kinds = [(tuple(a for a, size in plan.grid.sizes.items() if size > 1), plan.shape.name) for plan in some]
    assert 2 <= len(set(kinds)) == len(kinds) and some[0] == answer.plans[0]
    found = {each.name: each.plan for each in usual(answer)}
    fsdp, hsdp, sharded, megatron, plain = found.values()
    assert fsdp is not None and fsdp.grid == replace(Grid(z=64), placement=fsdp.grid.placement)
    assert hsdp is not None and (hsdp.grid.data, hsdp.grid.z) == (8, 8)
    assert sharded is not None and sharded.grid.y == 8 and sharded.sharded
    assert megatron is not None and megatron.grid.y == 8 and not megatron.sharded
    assert plain is not None and plain.grid.cube == 1 and plain.grid.pipe > 1 and plain.shape.name == "1f1b"
    assert all(plan is not None and plan.seconds >= some[0].seconds for plan in found.values())


def test_the_settings_file_is_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.toml"
    assert command(output=file)() == 0
    job = load(Job, file)
    assert job.grid.world == 8 and job.batch.samples == 16
    assert (job.dtype, job.device) == ("bfloat16", "cuda")
    job.laid_out()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("dtype", "where", "device"), [("float32", "perlmutter", "cuda"), ("bfloat16", "one-machine", "cpu")]
)
def test_a_planned_file_keeps_its_dtype_and_gets_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, where: str, device: str
) -> None:
    """So that `launch slurm` asks for GPUs where the plan has them."""
    base, file = tmp_path / "base.toml", tmp_path / "plan.toml"
    base.write_text(f'dtype = "{dtype}"\n[model]\npreset = "gpt-tiny"\n')
    options: dict[str, Any] = {"file": base, "model": None, "devices": 2, "global_batch": None, "cluster": where}
    assert command(**options, output=file)() == 0
    assert (load(Job, file).dtype, load(Job, file).device) == (dtype, device)
    capsys.readouterr()
    base.write_text('dtype = "float64"\n')
    with pytest.raises(UserError, match="dtype = 'float64': plans are for bfloat16 and float32"):
        command(**options, output=file)()


@pytest.mark.parametrize("with_file", [False, True])
def test_slurm_is_asked_for_the_gpus_of_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], with_file: bool
) -> None:
    base, file = tmp_path / "base.toml", tmp_path / "plan.toml"
    base.write_text('[model]\npreset = "gpt-tiny"\n[batch]\nsamples = 16\nsequence = 64\n')
    given: dict[str, Any] = {"file": base, "model": None, "global_batch": None} if with_file else {}
    assert command(**given, devices=16, output=file)() == 0
    assert Slurm(file=file)() == 0
    assert "#SBATCH --gpus-per-node=8" in capsys.readouterr().out


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.html"
    assert command(model="gpt-5b", devices=16, cluster="dgx-h100", sequence=512, html=file)() == 0
    page = Page(file.read_text())
    data = page.data
    assert data["sentence"] and data["refused"] and data["capacity"] > data["room"] > 0
    assert len({(plan["name"], plan["schedule"]) for plan in data["plans"]}) == len(data["plans"]) > 1
    assert {plan["label"] for plan in data["usual"]} >= {"FSDP", "HSDP", "Megatron-LM"}
    for plan in [*data["plans"], *(plan for plan in data["usual"] if "why" not in plan)]:
        assert sum(plan["time"].values()) == pytest.approx(plan["step_s"]) and min(plan["time"].values()) >= 0
        assert sum(plan["memory"].values()) == pytest.approx(plan["memory_gb"] * 1e9, rel=1e-6)
        assert (plan["timeline"] is None) == (plan["grid"]["pipe"] == 1) and plan["error_s"] > 0
    assert [each["devices"] for each in data["scaling"]] == [2, 4, 8, 16, 32]
    best = tmp_path / "best.toml"
    best.write_text(data["plans"][0]["settings"])
    assert load(Job, best).grid.world == 16
    capsys.readouterr()


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(explain="pipe=2,data=4")() == 0
    out = capsys.readouterr().out
    assert "loses by" in out or "wins" in out
    assert command(explain="y=8")() == 0
    assert capsys.readouterr().out


def test_a_model_that_fits_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(model="gpt-80b", devices=2)() == 1
    assert "none can run" in capsys.readouterr().out
    with pytest.raises(UserError, match="no decomposition can run"):
        command(model="gpt-80b", devices=2, output=Path("nowhere.toml"))()
    assert not Path("nowhere.toml").exists()


def test_no_plan_has_a_schedule_that_is_refused_when_it_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(devices=2, global_batch=2**23)() in (0, 1)
    assert "schedule: more than 250,000 forwards" in capsys.readouterr().out


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean"):
        command(model="gpt-tinny")()
    with pytest.raises(UserError, match="perlmutter"):
        command(cluster="perlmuter")()
    with pytest.raises(UserError, match="--devices must be at least 1, got 0"):
        command(devices=0)()
    with pytest.raises(UserError, match="--global-batch must be from 1 to 16,777,216"):
        command(global_batch=10**20)()
    with pytest.raises(UserError, match="unknown grid axis"):
        command(explain="w=8")()
    with pytest.raises(UserError, match="cannot write"):
        command(output=tmp_path / "no" / "plan.toml")()


@pytest.mark.parametrize("recipe", [False, True])
def test_a_settings_file_is_planned_for_and_the_plan_takes_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: bool
) -> None:
    """Also where it has options that the plan's schedule does not take, and where it is a program."""
    base, file = tmp_path / ("base.py" if recipe else "base.toml"), tmp_path / "plan.toml"
    given = {
        "seed": 5,
        "model": {"preset": "gpt-tiny", "layers": 3},
        "batch": {"samples": 16, "sequence": 32},
        "grid": {"pipe": 2},
        "schedule": {"name": "chimera", "pairs": 1, "microbatches": 2},
        "layout": {"compile": True},
    }
    base.write_text(f"settings = {given!r}\n" if recipe else write(convert(Job, given)))
    options: dict[str, Any] = {"file": base, "model": None, "devices": 4, "global_batch": None, "output": file}
    assert command(**options, overrides=("--batch.samples=32", "--model.layers=4"))() == 0
    job = load(Job, file)
    assert (job.seed, job.model.layers, job.batch.samples, job.grid.world) == (5, 4, 32, 4)
    assert job.layout.compile
    job.laid_out()
    capsys.readouterr()
    with pytest.raises(UserError, match="would take the place of the file"):
        command(**{**options, "output": base})()
    with pytest.raises(UserError, match="FILE or --model"):
        command(file=base)()
    with pytest.raises(UserError, match="give a FILE, or --model"):
        command(model=None)()
