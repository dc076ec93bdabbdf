"""A model whose cut is found: its list of layers on each plane, x by y, that was traced. No torch here.

What was traced of a Hugging Face folder is kept in the user's cache, so that the next plan of it needs no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cubeloom.base.divisors import divisors
from cubeloom.base.errors import UserError
from cubeloom.base.files import check_sealed, read_json, write_sealed
from cubeloom.base.host import cache_folder, version
from cubeloom.plan.model.model import Model, Piece
from cubeloom.plan.model.values import plain, value_of

if TYPE_CHECKING:
    from cubeloom.models import ModelSource

Plane = tuple[int, int]
FIRST: Set[Plane] = frozenset({(1, 1), (1, 2), (2, 1), (2, 2)})
_SOURCE = Path(__file__).parents[2]
_ANY = 2**30  # positions of a model that takes any sequence


@dataclass
class Traced:
    """`row`: the pieces of the whole model, each as the place of the piece that it is like. `cuts`: as a `Model` has them."""

    sequence: int
    row: tuple[int, ...]
    cuts: dict[int, tuple[int, ...]]
    planes: dict[Plane, tuple[Piece, ...] | None] = field(default_factory=dict)  # None: it cannot be cut so


class Tracer(Protocol):
    """What traces a model: it holds the model itself."""

    traced: Traced

    def pieces(self, x: int, y: int) -> tuple[Piece, ...]:
        """On a plane. Raises UserError where it cannot be cut so."""
        ...


class FoundModel:
    """Asked for planes one by one: tracing takes time, and a search needs few of them.

    A plane that was not traced yet is taken to be like the largest that was traced and divides it: what a smaller one cuts, a
    larger one cuts at best.
    """

    def __init__(self, name: str, tracer: Callable[[], Tracer], kept: Path | None = None) -> None:
        """`kept`: the file of what was traced before. Raises UserError where the model cannot be traced."""
        self._name, self._make, self._kept = name, tracer, kept
        self._tracer: Tracer | None = None
        known = None if kept is None else _read(kept)
        self._traced = known or self._ready().traced
        self.trace(FIRST)

    @property
    def sequence(self) -> int:
        return self._traced.sequence

    def trace(self, planes: Set[Plane]) -> bool:
        """Whether any of these is not what it was taken to be."""
        changed, known = False, self._traced.planes
        new = sorted(planes - known.keys(), key=sum)
        for plane in new:
            like = self._like(plane) if known else None
            try:
                known[plane] = self._ready().pieces(*plane)
            except UserError:
                known[plane] = None
            changed |= like is None or known[plane] != known[like]
        if new and self._kept is not None:
            _write(self._kept, self._traced)
        return changed

    def _ready(self) -> Tracer:
        self._tracer = self._tracer or self._make()
        return self._tracer

    def on(self, devices: int) -> Model:
        """On all planes of so many devices, as far as they are known."""
        variants: dict[tuple[Piece, ...], set[Plane]] = {}
        for plane in _planes(devices):
            pieces = self._traced.planes[self._like(plane)]
            if pieces is not None:
                variants.setdefault(pieces, set()).add(plane)
        found = [self._model(pieces, frozenset(planes)) for pieces, planes in variants.items()]
        return replace(found[0], others=tuple(found[1:]))

    def _like(self, plane: Plane) -> Plane:
        """The largest plane that was traced and divides this one: an axis of one rank is like no other."""
        x, y = plane
        fitting = [
            (a, b)
            for a, b in self._traced.planes
            if x % a == 0 and y % b == 0 and (a > 1) == (x > 1) and (b > 1) == (y > 1)
        ]
        return max(fitting, key=lambda each: each[0] * each[1], default=(min(x, 2), min(y, 2)))

    def _model(self, pieces: tuple[Piece, ...], planes: frozenset[Plane]) -> Model:
        kinds = tuple(dict.fromkeys(pieces))
        row = tuple(kinds.index(pieces[place]) for place in self._traced.row)
        return Model(
            name=self._name, sequence=self.sequence, kinds=kinds, row=row, cuts=self._traced.cuts, planes=planes
        )


def _planes(devices: int) -> Iterator[Plane]:
    """The smallest first."""
    yield from sorted(((x, y) for x in divisors(devices) for y in divisors(devices // x)), key=sum)


def found_model(name: str, called: str, source: Callable[[], ModelSource], sequence: int | None) -> FoundModel:
    """`called`: as the user calls the model that `source` gives. By default sequences are the longest that it takes."""

    def tracer() -> Tracer:
        from cubeloom.plan.model.derive_found import ModelTracer

        made = source()
        if made.positions is None:
            return ModelTracer(made, 1)
        if sequence is None and made.positions >= _ANY:
            raise UserError(f"{name} does not say how long a sequence may be: give --sequence")
        return ModelTracer(made, sequence or made.positions)

    config = Path(called) / "config.json"
    return FoundModel(name, tracer, kept_file(config, sequence) if config.is_file() else None)


def kept_file(config: Path, sequence: int | None) -> Path:
    """Where what was traced of a Hugging Face folder is kept: named after all that it depends on."""
    said = [config.read_bytes(), str(sequence).encode()]
    said += [f"{package} {version(package)}".encode() for package in ("torch", "transformers")]
    said += [file.read_bytes() for file in sorted(_SOURCE.rglob("*.py"))]
    digest = hashlib.blake2b(digest_size=20)
    for each in said:
        digest.update(len(each).to_bytes(8) + each)
    return cache_folder() / "traced" / f"{digest.hexdigest()}.json"


def _read(file: Path) -> Traced | None:
    """None where there is none, or where it is not what was written: then the model is traced anew."""
    try:
        content = read_json(file)
        check_sealed(file, content)
        cuts = {count: tuple(ends) for count, ends in content["cuts"]}
        planes = {(x, y): value_of(pieces) for x, y, pieces in content["planes"]}
        return Traced(content["sequence"], tuple(content["row"]), cuts, planes)
    except (OSError, UserError, KeyError, TypeError, ValueError):
        return None


def _write(file: Path, traced: Traced) -> None:
    """A cache that cannot be written is none."""
    content = {
        "sequence": traced.sequence,
        "row": traced.row,
        "cuts": list(traced.cuts.items()),
        "planes": [[*plane, plain(pieces)] for plane, pieces in traced.planes.items()],
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(file, content)
    except OSError:
        return
