"""Writes the lists of layers again, after a model or its cut has changed."""

from __future__ import annotations

from cubeloom import models
from cubeloom.plan.model.derive import derive
from cubeloom.plan.model.store import DATA, text


def main() -> None:
    DATA.mkdir(exist_ok=True)
    found = {name: text(derive(name)) for name in models.names()}
    for old in DATA.glob("*.json"):
        old.unlink()
    for name, lines in found.items():
        (DATA / f"{name}.json").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
