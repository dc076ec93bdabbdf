"""The explorer's server: who may ask, what it answers, and that it answers what the library computes."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

import pytest

from cubeloom import Grid
from cubeloom.base.errors import UserError
from cubeloom.base.pages import CURVES, SCRIPTS
from cubeloom.cli.explore import Explore
from cubeloom.models.named import kind_of
from cubeloom.parallel.config import Batch, ParallelConfig, ShardingPolicy
from cubeloom.parallel.volume import named, pass_volume
from cubeloom.pipeline import Costs, generate, simulate
from cubeloom.plan.model import load
from cubeloom.plan.search import search, usual
from cubeloom.tools.explore.app import application
from cubeloom.tools.explore.serve import listening
from metrics.runs import a_run, record

TOKEN = "secret"


def asked(path: str, folder: Path = Path("runs"), host: str = "127.0.0.1:80") -> tuple[int, str, dict[str, str]]:
    """Status, text and headers, without a network."""
    parts = urlsplit(path)
    sent: list[dict[str, Any]] = []
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http",
        "path": parts.path, "raw_path": parts.path.encode(), "query_string": parts.query.encode(), "root_path": "",
        "headers": [(b"host", host.encode())], "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer() -> None:
        await application(TOKEN, folder)(scope, receive, send)

    asyncio.run(answer())
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], b"".join(each.get("body", b"") for each in sent).decode(), headers


def answered(name: str, folder: Path = Path("runs"), /, **values: object) -> Any:
    status, text, _ = asked(f"/{TOKEN}/api/{name}?{urlencode(values)}", folder)
    assert status == 200, text
    return json.loads(text)


def refused(name: str, folder: Path = Path("runs"), /, **values: object) -> str:
    status, text, _ = asked(f"/{TOKEN}/api/{name}?{urlencode(values)}", folder)
    assert status == 400
    return str(json.loads(text)["error"])


@pytest.mark.parametrize(
    "path", ["/", "/index.html", "/api/plan", "/secre/", "/secret2/api/choices", "/wrong/api/runs"]
)
def test_nobody_is_answered_without_the_token(path: str) -> None:
    assert asked(path)[0] == 403


def test_other_hosts_are_refused() -> None:
    """A page of another site that resolves its name to this machine is of another host."""
    assert asked(f"/{TOKEN}/")[0] == 200
    for host in ("localhost:8000", "127.0.0.1", "[::1]:99"):
        assert asked(f"/{TOKEN}/", host=host)[0] == 200
    for host in ("evil.example", "127.0.0.1.evil.example:80", ""):
        assert asked(f"/{TOKEN}/", host=host)[0] == 403


def test_every_file_of_the_page_is_served_and_nothing_else() -> None:
    status, page, headers = asked(f"/{TOKEN}/")
    assert status == 200 and "script-src 'self'" in headers["content-security-policy"]
    assert headers["referrer-policy"] == "no-referrer" and headers["cache-control"] == "no-store"
    for name in (*SCRIPTS, *CURVES, "controls.js", "layouts.js", "explore.js", "style.css"):
        assert f'"{name}"' in page and asked(f"/{TOKEN}/{name}")[0] == 200
    for name in ("uPlot.LICENSE.txt", "../__init__.py", "static/style.css", "nothing"):
        assert asked(f"/{TOKEN}/{name}")[0] == 404


def test_it_listens_on_this_machine_alone() -> None:
    with listening(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1" and listener.family is socket.AF_INET
        with pytest.raises(UserError, match=r"cannot be used: .*leave out --port"):
            listening(listener.getsockname()[1])


@pytest.mark.slow
def test_a_plan_is_that_of_the_search() -> None:
    values = {"model": "gpt-tiny", "cluster": "perlmutter", "devices": 8, "batch": 16}
    found = answered("plan", **values)
    answer = search("gpt-tiny", "perlmutter", 8, 16)
    assert found["plans"][0]["name"] == str(answer.plans[0].grid)
    assert found["plans"][0]["step_s"] == answer.plans[0].seconds and found["considered"] == answer.considered
    for each in usual(answer):
        beside = answered("usual", name=each.name, **values)
        assert each.name in found["compared"] and beside["label"] == each.name
        assert beside.get("step_s") == (None if each.plan is None else each.plan.seconds)
    assert "there are FSDP" in refused("usual", name="GSPMD", **values)


def test_a_plan_that_cannot_be_asks_for_other_devices() -> None:
    found = answered("plan", model="gpt-80b", cluster="perlmutter", devices=2, batch=16)
    assert found["plans"] == [] and found["refused"]["memory"] and isinstance(found["nearest"], list)


def test_schedules_are_those_of_the_simulator() -> None:
    found = answered("schedules", name="chimera", compare="zb-h1", stages=4, microbatches=8, F=1.5, p2p=0.25, pairs=2)
    names = [each["name"] for each in found["timelines"]]
    assert names == ["chimera", "zb-h1"]
    schedule = generate("chimera", 4, 8, pairs=2)
    timeline = simulate(schedule, Costs.like(schedule, 1.5, 1.0, 1.0, 0.25))
    assert found["timelines"][0]["makespan"] == timeline.makespan
    assert found["timelines"][0]["peaks"] == list(timeline.peak_activations)
    reduced = answered("schedules", name="chimera", stages=4, microbatches=4, reduce=2, sync="eager")
    assert len(reduced["timelines"][0]["reductions"]) == 4 and reduced["timelines"][0]["makespan"] == 18


def test_layouts_are_those_of_the_specs() -> None:
    found = answered("layouts", model="gpt-tiny", z=2, y=2, x=2, samples=8, sequence=16)
    assert found["ranks"] == [Grid(z=2, y=2, x=2).coordinates(rank) for rank in range(8)]
    (block,) = [piece for piece in found["pieces"] if piece["block"]]
    assert block["count"] == 2
    (up,) = [layer for layer in block["layers"] if layer["name"] == "mlp.up"]
    weight, bias = up["parameters"]
    assert (weight["shape"], weight["cuts"], weight["parts"]) == ([384, 96], ["y·z", "x"], [4, 2])
    assert weight["bytes"] == 384 * 96 * 2 / 8
    assert weight["blocks"] == [[2 * rank["y"] + rank["z"], rank["x"]] for rank in found["ranks"]]  # y is outermost
    assert len({tuple(block) for block in bias["blocks"]}) == bias["parts"][0] == 2
    grid, policy = Grid(z=2, y=2, x=2), ShardingPolicy()
    c = ParallelConfig.exact(grid, policy, Batch(8, 16), 2)
    (spec,) = [layer for kind in load("gpt-tiny").kinds for layer in kind.layers if layer.name == "mlp.up"]
    assert sum(each["received"] for each in up["collectives"]) == sum(named(pass_volume(spec, c), c).values())
    assert up["moved"]["x"] == pytest.approx(float(named(pass_volume(spec, c), c)["x"]))


@pytest.mark.slow
def test_layouts_of_a_hugging_face_folder_are_traced(tmp_path: Path) -> None:
    values: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **values}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = answered("layouts", model=tmp_path, z=2, y=2, x=1, samples=4)
    layers = {layer["name"]: layer for piece in found["pieces"] for layer in piece["layers"]}
    (weight,) = layers["self_attn.q_proj"]["parameters"]
    assert weight["shape"] == [32, 32] and weight["bytes"] == 32 * 32 * 2 / 4
    assert [piece["count"] for piece in found["pieces"]] == [1, 2, 1]


def test_rows_that_lie_in_another_order_are_told() -> None:
    """Of gate and up each rank has its part; a vocabulary that does not divide is padded."""
    found = answered("layouts", model="llama-tiny", z=1, y=2, x=1, samples=2)
    layers = {layer["name"]: layer for piece in found["pieces"] for layer in piece["layers"]}
    rows = layers["attention.qkv"]["parameters"][0]["rows"]
    assert rows["dim"] == 0 and rows["of"][0] == [[0, 48], [96, 120], [144, 168]]


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("plan", {"model": "gpt-tinny"}, "did you mean"),
        ("plan", {"cluster": "perlmuter"}, "did you mean perlmutter"),
        ("plan", {"devices": "many"}, "devices is 'many': give a whole number"),
        ("plan", {"devices": 0}, "must be at least 1"),
        ("plan", {"dtype": "float64"}, "it is one of bfloat16, float32"),
        ("plan", {"reserve": "nan"}, "give a finite number"),
        ("schedules", {"name": "1f2b"}, "it is one of"),
        ("schedules", {"name": "chimera", "stages": 5}, "try 4 or 6"),
        ("schedules", {"stages": 100, "microbatches": 100}, "a page draws at most 4,000"),
        ("schedules", {"F": -1}, "F must be"),
        ("layouts", {"y": 5, "z": 1, "x": 1}, "cannot be cut over y=5"),
        ("layouts", {"samples": 3}, "take a multiple of 2"),
        ("layouts", {"data": 64}, "a page draws at most 64"),
        ("layouts", {"weights": "gone"}, "it is one of freed, kept, replicated"),
        ("run", {"names": "../elsewhere"}, "has no run '../elsewhere'"),
    ],
)
def test_mistakes_are_named(name: str, values: dict[str, object], words: str) -> None:
    assert words in refused(name, **values)


def test_a_page_starts_no_program() -> None:
    assert kind_of("examples/nano_gpt.py:build") == "file"
    assert "which executes it" in refused("plan", model="examples/nano_gpt.py:build")
    assert "which executes it" in refused("layouts", model="examples/nano_gpt.py:build")


def test_runs_are_listed_drawn_and_sent_again_only_when_they_changed(tmp_path: Path) -> None:
    a_run(tmp_path / "one", [record(step) for step in range(5)])
    a_run(tmp_path / "deep" / "two", [record(0)])
    assert {run["name"] for run in answered("runs", tmp_path)["runs"]} == {"one", "deep/two"}
    found = answered("run", tmp_path, names="one,deep/two")
    assert [run["name"] for run in found["runs"]] == ["one", "deep/two"]
    assert found["runs"][0]["charts"][0]["series"][0]["steps"] == list(range(5))
    assert answered("run", tmp_path, names="one,deep/two", seen=found["seen"])["runs"] is None
    with (tmp_path / "one" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(5).as_json()) + "\n")
    assert (
        len(answered("run", tmp_path, names="one", seen=found["seen"])["runs"][0]["charts"][0]["series"][0]["steps"])
        == 6
    )
    assert [run["name"] for run in answered("runs", tmp_path / "one")["runs"]] == ["one"]


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cubeloom.cli.explore.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"needs starlette and uvicorn: pip install 'cubeloom\[explore\]'"):
        Explore()()
    with pytest.raises(UserError, match="--port must be"):
        Explore(port=70000)()


@pytest.mark.slow
def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cubeloom", "explore", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        address = served.stdout.readline().strip()
        with urlopen(address) as page:
            assert b"Cubeloom" in page.read()
        with urlopen(f"{address}api/runs") as page:
            assert json.load(page)["runs"] == []
        served.send_signal(2)
        _, errors = served.communicate(timeout=20)
    assert served.returncode in (0, 130) and "Traceback" not in errors
