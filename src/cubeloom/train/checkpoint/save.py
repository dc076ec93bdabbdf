"""Writing checkpoints: at once, or by a thread while training goes on."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from errno import ENOSPC
from os import strerror
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from cubeloom.comm import Aside, Network
from cubeloom.errors import UserError, first_line
from cubeloom.file_errors import MAY_PASS, PAUSES, FilesFailed, failure, retried
from cubeloom.files import replace_folder, sync_names
from cubeloom.train.checkpoint.entries import Optimizer, Parameters, said_of, state_of, weights_of
from cubeloom.train.checkpoint.load import METADATA, files_named
from cubeloom.train.checkpoint.manifest import checkpoints, checksum, seal
from cubeloom.train.checkpoint.noting import NotingFiles
from cubeloom.train.checkpoint.shard import Shard

_FULL = 2**20  # bytes free, of a disk that somebody just failed to write to


def save_checkpoint(
    folder: Path,
    step: int,
    parameters: Parameters,
    optimizer: Optimizer,
    network: Network,
    progress: Mapping[str, Any],
    keep: int = 2,
) -> Path:
    """Write all that is needed to go on after `step` steps; called by all ranks. The newest `keep` are kept.

    `progress` is what is not a tensor, such as the position in the data: JSON, the same on all ranks.
    """
    shards = weights_of(parameters, network) | state_of(parameters, optimizer, network)
    return _write(folder, step, shards, network, network.aside, progress, said_of(optimizer), keep)


class CheckpointWriter:
    """Checkpoints written by a thread while training goes on, one at a time. All ranks call the same."""

    def __init__(self, folder: Path, network: Network, keep: int) -> None:
        self._folder = folder
        self._network = network
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        # Its own, made by all ranks together: two threads of a rank must not speak in one group.
        self._aside = network.another_aside()

    def save(self, step: int, parameters: Parameters, optimizer: Optimizer, progress: Mapping[str, Any]) -> None:
        """Copy everything now, and write it later."""
        self.wait()
        shards = weights_of(parameters, self._network) | state_of(parameters, optimizer, self._network)
        copies = {
            name: Shard.of(shard.local.to("cpu", copy=True), shard.whole, shard.offset)
            for name, shard in shards.items()
        }
        said = said_of(optimizer)
        arguments = self._folder, step, copies, self._network, self._aside, progress, said, self._keep
        # A rank that fails because another is gone must not wait for it: it waits for that other, too.
        self._thread = threading.Thread(target=self._work, args=arguments, name="cubeloom checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the last one is in its place; raises what kept it from there."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _work(self, *arguments: Any) -> None:
        try:
            _write(*arguments)
        except BaseException as error:  # it is the training thread's to raise
            self._failure = error


def _write(
    folder: Path,
    step: int,
    shards: Mapping[str, Shard],
    network: Network,
    aside: Aside,
    progress: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    keep: int,
) -> Path:
    final = folder / f"step-{step:08d}"
    writing = folder / f".{final.name}"
    what = f"the checkpoint {final} could not be written"
    aside.follow_first(lambda: retried(what, lambda: _make_folder(writing)))
    _save_shards(writing, shards, aside, what)
    # Each rank reads its own files back, so that none reads them all.
    mine = aside.agree(lambda: {file.name: checksum(file) for file in writing.glob(f"__{network.rank}_*")})
    gathered = {name: each for theirs in aside.gather(mine) for name, each in theirs.items()}

    def finish() -> None:
        checksums = {**gathered, METADATA: checksum(writing / METADATA)}
        named = {*files_named(writing), METADATA}
        retried(what, lambda: seal(writing, step, progress, optimizer, checksums, named))
        retried(what, lambda: _put_in_place(writing, final))
        retried(what, lambda: sync_names(folder))  # before those go that it replaces
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)
        sweep(folder)

    aside.follow_first(finish)
    return final


def _save_shards(writing: Path, shards: Mapping[str, Shard], aside: Aside, what: str) -> None:
    """All ranks together, and where that fails in a way that may pass, all try again together."""
    for pause in (*PAUSES, None):
        writer = FileSystemWriter(writing, sync_files=True)
        writer.fs = files = NotingFiles()
        try:
            save(dict(shards), storage_writer=writer, process_group=aside.group)
            return
        except CheckpointException as error:
            rank, (theirs, _) = min(error.failures.items())
            mine = files.errors[0] if files.errors else OSError(ENOSPC, strerror(ENOSPC)) if _is_full(writing) else None
            known = aside.gather((aside.name, mine))
            name, problem = next((each for each in known if each[1] is not None), (known[rank][0], theirs))
            if not (isinstance(problem, OSError) and problem.errno in MAY_PASS and pause is not None):
                raise _not_written(f"{what}: {name}", problem) from error
            time.sleep(pause)


def _not_written(what: str, problem: BaseException) -> UserError | FilesFailed:
    return failure(what, problem) if isinstance(problem, OSError) else FilesFailed(f"{what}: {first_line(problem)}")


def _is_full(folder: Path) -> bool:
    there = folder if folder.exists() else folder.parent
    with suppress(OSError):
        return shutil.disk_usage(there).free < _FULL
    return False


def _make_folder(writing: Path) -> None:
    if writing.exists():
        shutil.rmtree(writing)
    writing.mkdir(parents=True)


def _put_in_place(writing: Path, final: Path) -> None:
    if (
        writing.exists() or not final.exists()
    ):  # else a try before this one did it, though the file server said otherwise
        replace_folder(writing, final)


def sweep(folder: Path) -> None:
    """Remove what saves left that crashed: only one is written at a time, and none when this is called."""
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)
