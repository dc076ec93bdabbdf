"""Writing checkpoints: at once, or by a thread while training goes on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cubeloom.comm import Aside, Network
from cubeloom.errors import UserError, first_line
from cubeloom.files import checksum, replace_folder, sync_names
from cubeloom.train.checkpoint.blocks import assign, write_blocks
from cubeloom.train.checkpoint.entries import Optimizer, Parameters, said_of, state_of, weights_of
from cubeloom.train.checkpoint.manifest import checkpoints, seal
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
    _by_first(network, aside, final, lambda: _make_folder(writing))
    names, index = assign(shards, aside)

    def write_mine() -> dict[str, str]:
        try:
            wrote = write_blocks(writing, network.rank, {name: shards[name] for name in names}, index)
            # Each rank reads its own files back, so that none reads them all.
            return {file.name: checksum(file) for file in wrote}
        except OSError as error:
            raise not_written(final, error) from error

    checksums = aside.gather(aside.agree(write_mine))

    def finish() -> None:
        seal(writing, step, progress, optimizer, {name: each for mine in checksums for name, each in mine.items()})
        replace_folder(writing, final)
        sync_names(folder)  # before those go that it replaces
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)

    _by_first(network, aside, final, finish)
    return final


def _by_first(network: Network, aside: Aside, final: Path, work: Callable[[], None]) -> None:
    """One rank works; all wait for it, and fail with it."""

    def mine() -> None:
        try:
            if network.rank == 0:
                work()
        except OSError as error:
            raise not_written(final, error) from error

    aside.agree(mine)


def not_written(final: Path, error: BaseException) -> UserError:
    # Of a full disk torch only says where in its own code it could not write.
    free = shutil.disk_usage(final.parent).free if final.parent.exists() else None
    words = "the disk is full" if free is not None and free < _FULL else first_line(error)
    return UserError(f"the checkpoint {final} could not be written: {words}; those before it are whole")


def _make_folder(writing: Path) -> None:
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
