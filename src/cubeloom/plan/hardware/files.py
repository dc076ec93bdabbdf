"""Find, read and write the files of devices and clusters."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cubeloom.base.errors import UserError
from cubeloom.plan.hardware.cluster import Cluster, Tier
from cubeloom.plan.hardware.device import Device
from cubeloom.plan.hardware.facts import Fact, numbers, read

DATA = Path(__file__).parent / "data"
_WORDS = {"name", "about", "kind", "device", "inner_tiers", "outer_tiers"}


def devices() -> tuple[str, ...]:
    """The names that `device` knows."""
    return _names("devices")


def clusters() -> tuple[str, ...]:
    """The names that `cluster` knows."""
    return _names("clusters")


def device(name: str | Path) -> Device:
    """The device of this name, or of a TOML file of the user's own."""
    return _device(_find(name, "devices"))


def cluster(name: str | Path) -> Cluster:
    """The cluster of this name, or of a TOML file of the user's own.

    Its `device` is a name, or `self`: the device that the same file describes.
    """
    return _cluster(_find(name, "clusters"))


@cache
def _names(folder: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (DATA / folder).glob("*.toml")))


def _find(name: str | Path, folder: str) -> Path:
    text = str(name)
    if text in _names(folder):
        return DATA / folder / f"{text}.toml"
    path = Path(name)
    if path.is_file():
        return path
    kind = folder.removesuffix("s")
    if path.suffix == ".toml":
        raise UserError(f"no file {text}; a {kind} is a TOML file or one of {', '.join(_names(folder))}")
    longer = [each for each in _names(folder) if each.startswith(text)]
    near = longer or difflib.get_close_matches(text, _names(folder), 1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise UserError(f"unknown {kind} {text!r}{hint} There are {', '.join(_names(folder))}, or a TOML file of your own")


def _device(path: Path) -> Device:
    table = _table(path, "device")
    facts = read(Device, table, f"{path}: device")
    kind = _text(table, "kind", path) if "kind" in table else None
    return Device(**_named(table, path), kind=kind, **_values(Device, facts), facts=facts)


def _cluster(path: Path) -> Cluster:
    table = _table(path, "cluster")
    rank_stride, inner_facts = _tiers(table, "inner_tiers", path)
    outer, outer_facts = _tiers(table, "outer_tiers", path)
    facts = read(Cluster, table, f"{path}: cluster")
    return Cluster(
        **_named(table, path),
        device=_device(path) if table.get("device") == "self" else device(_text(table, "device", path)),
        **_values(Cluster, facts),
        inner_tiers=rank_stride,
        outer_tiers=outer,
        facts={**facts, **inner_facts, **outer_facts},
    )


def _table(path: Path, kind: str) -> Mapping[str, Any]:
    try:
        whole = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    table = whole.get(kind)
    if not isinstance(table, Mapping):
        raise UserError(f"{path} has no table [{kind}]")
    known = set(numbers({"device": Device, "cluster": Cluster}[kind])) | _WORDS
    for name in table:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise UserError(f"{path}: unknown {kind} entry {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return table


def _text(table: Mapping[str, Any], name: str, path: Path) -> str:
    value = table.get(name)
    if not isinstance(value, str):
        raise UserError(f"{path}: {name} = {value!r} should be text")
    return value


def _named(table: Mapping[str, Any], path: Path) -> dict[str, Any]:
    return {name: _text(table, name, path) for name in ("name", "about")}


def _values(kind: type, facts: Mapping[str, Fact]) -> dict[str, Any]:
    """Plain numbers; counts are whole."""
    wanted = numbers(kind)
    return {name: int(fact.value) if wanted[name].type == "int" else float(fact.value) for name, fact in facts.items()}


def _tiers(table: Mapping[str, Any], name: str, path: Path) -> tuple[tuple[Tier, ...], dict[str, Fact]]:
    given = table.get(name, [])
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        raise UserError(f"{path}: {name} should be a list of tables, as [[cluster.{name}]] makes")
    tiers: list[Tier] = []
    facts: dict[str, Fact] = {}
    for place, each in enumerate(given):
        found = read(Tier, each, f"{path}: {name} {place}")
        tiers.append(Tier(**_values(Tier, found)))
        facts |= {f"{name}.{place}.{field}": fact for field, fact in found.items()}
    return tuple(tiers), facts


def written(machine: Cluster) -> str:
    """The text of a file from which `device` and `cluster` read this cluster and its device."""
    whole = ["[cluster]", *_lines(machine), 'device = "self"', *_facts(machine.facts), ""]
    for kind in ("inner_tiers", "outer_tiers"):
        for place in range(len(getattr(machine, kind))):
            own = f"{kind}.{place}."
            found = {name.removeprefix(own): fact for name, fact in machine.facts.items() if name.startswith(own)}
            whole += [f"[[cluster.{kind}]]", *_facts(found), ""]
    part = ["[device]", *_lines(machine.device), *_facts(machine.device.facts), ""]
    return "\n".join(whole + part)


def _lines(part: Cluster | Device) -> list[str]:
    words = {name: getattr(part, name, None) for name in ("name", "about", "kind")}
    return [f"{name} = {json.dumps(word, ensure_ascii=False)}" for name, word in words.items() if word is not None]


def _facts(facts: Mapping[str, Fact]) -> list[str]:
    """Those of a part of a cluster, such as a tier, stand with that part."""
    return [f"{name} = {_fact(fact)}" for name, fact in facts.items() if "." not in name]


def _fact(fact: Fact) -> str:
    said = {"source": fact.source, "confidence": fact.confidence}
    words = ", ".join(f"{name} = {json.dumps(word, ensure_ascii=False)}" for name, word in said.items())
    scatter = "" if fact.scatter is None else f", scatter = {fact.scatter!r}"
    return f"{{ value = {fact.value!r}, {words}{scatter} }}"
