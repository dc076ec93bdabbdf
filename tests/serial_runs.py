"""Serial runs of `verify`, each computed once in a session and shared by all tests, also those of another worker.

A run lies in a folder of the session that is named after all that the run depends on. It is computed beside and renamed, so
that nobody sees half of one; where two workers compute the same at once, the first to end leaves its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from tempfile import mkdtemp

import torch

from cubeloom.comm import devices
from cubeloom.launch import RankPool
from cubeloom.tools.verify import Experiment, Report, SerialRun, serial_of, train_serially, verify

LOSSES = "losses.json"


class Verified:
    """`verify` on the shared ranks, with serial runs that are computed once: `verified(experiment)`."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder

    def __call__(self, experiment: Experiment) -> Report:
        return verify(experiment, pool=self._ranks, serially=self.serially)

    def serially(self, experiment: Experiment) -> SerialRun:
        """The run of this experiment, computed if nobody has before."""
        folder = self._folder / key_of(experiment)
        if not folder.exists():
            self._compute(experiment, folder)
        return SerialRun(json.loads((folder / LOSSES).read_text()), folder)

    def _compute(self, experiment: Experiment, folder: Path) -> None:
        beside = Path(mkdtemp(prefix="computing-", dir=self._folder))
        run = train_serially(experiment, beside, self._ranks, devices.CPU, timeout=120)
        (beside / LOSSES).write_text(json.dumps(run.losses))
        try:
            beside.rename(folder)
        except OSError:
            # A folder that is not empty is never replaced: another worker was first, and has left the same.
            assert folder.exists()


def key_of(experiment: Experiment) -> str:
    """The same for two experiments only if all that their serial runs depend on is equal."""
    wanted = serial_of(experiment)
    weights = b"" if wanted.weights is None else Path(wanted.weights).read_bytes()
    whole = (wanted.asynchronous, described(wanted), hashlib.blake2b(weights).hexdigest())
    return hashlib.blake2b(repr(whole).encode(), digest_size=16).hexdigest()


def described(value: object) -> object:
    """All fields, of any depth, in words that no two unequal values share. Refuses what it does not know."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__qualname__, [(each.name, described(getattr(value, each.name))) for each in fields(value)]
    if isinstance(value, Mapping):
        return type(value).__name__, sorted((repr(key), described(each)) for key, each in value.items())
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [described(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return type(value).__name__, sorted(repr(described(each)) for each in value)
    if value is None or isinstance(value, (str, bytes, bool, int, float, Enum, torch.dtype)):
        return repr(value)
    raise TypeError(f"a serial run depends on {value!r}, and two of {type(value)} cannot be told apart")
