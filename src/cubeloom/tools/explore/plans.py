"""The view Plan: the answer of a search, with the strategies that many would take beside it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.models.named import kind_of
from cubeloom.plan.hardware import cluster, clusters
from cubeloom.plan.model import load, names
from cubeloom.plan.model.found import FoundModel, found_model
from cubeloom.plan.report.view import compared, view
from cubeloom.plan.search import Answer, counts_that_work, planned_dtype, search, usual_names
from cubeloom.tools.explore.query import Query

DTYPES = ("bfloat16", "float32")


def choices() -> dict[str, Any]:
    """What its controls offer."""
    machines = {name: cluster(name) for name in clusters()}
    return {
        "models": [{"name": name, "sequence": load(name).sequence, "tokens": load(name).tokens} for name in names()],
        "clusters": [
            {
                "name": name,
                "about": each.about,
                "devices": each.devices,
                "per_node": each.devices_per_node,
                "device": each.device.name,
            }
            for name, each in machines.items()
        ],
        "dtypes": DTYPES,
    }


def planned(asked: Query) -> dict[str, Any]:
    found = _asked(asked)
    return view(found) | ({} if found.plans else {"nearest": counts_that_work(found)})


def usual(asked: Query) -> dict[str, Any]:
    """One of the strategies that many would take, by its name, for the same question."""
    answer, name = _asked(asked), asked.get("name", "")
    if name not in usual_names(answer):
        raise UserError(f"no usual strategy is called {name!r}; there are {', '.join(usual_names(answer)) or 'none'}")
    return compared(answer, name)


def _asked(asked: Query) -> Answer:
    model, machine = asked.get("model", "gpt-5b"), asked.get("cluster", "dgx-h100")
    devices, samples = asked.whole("devices", 64), asked.whole("batch", 256)
    sequence = asked.whole("sequence", 0) or None
    dtype = asked.choice("dtype", DTYPES)
    reserve = asked.real("reserve", 8.0) / 100
    return _answer(model, machine, devices, samples, sequence, dtype, reserve, "record" in asked)


@lru_cache(maxsize=64)
def _answer(
    model: str,
    machine: str,
    devices: int,
    samples: int,
    sequence: int | None,
    dtype: str,
    reserve: float,
    record: bool,
) -> Answer:
    asked = machine, devices, samples, sequence, planned_dtype(dtype)
    if model in names():
        return search(model, *asked, reserve=reserve, record=record)
    from cubeloom.plan.search.found_cut import search_found

    return search_found(of_folder(model), *asked, reserve=reserve, record=record)


@lru_cache(maxsize=8)
def of_folder(name: str) -> FoundModel:
    """A Hugging Face folder, whose model is traced without values. A page must not start a user's program."""
    if kind_of(name) != "folder":
        raise UserError(f"model {name!r} is built by a program: use `cubeloom plan --model {name}`, which executes it")
    from cubeloom.models.named import named

    return found_model(name, name, lambda: named(name), None)
