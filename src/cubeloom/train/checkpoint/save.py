"""Writes checkpoints: directly, or in a thread while training continues."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cubeloom.base.file_errors import retried
from cubeloom.base.files import checksum, replace_folder, sync_names
from cubeloom.comm import HostGroup, Network
from cubeloom.train.checkpoint.blocks import assign, write_blocks
from cubeloom.train.checkpoint.entries import Optimizer, Parameters, said_of, state_of, weights_of
from cubeloom.train.checkpoint.index import INDEX, files_of, read_index
from cubeloom.train.checkpoint.manifest import checkpoints, name_of_step, seal
from cubeloom.train.checkpoint.shard import Shard


def save_checkpoint(
    folder: Path,
    step: int,
    parameters: Parameters,
    optimizer: Optimizer,
    network: Network,
    progress: Mapping[str, Any],
    keep: int = 2,
    best: int | None = None,
) -> Path:
    """Write everything needed to resume after `step` steps; called by all ranks. Keeps the newest `keep` and the
    `best`.

    `progress`: everything that is not a tensor, such as the position in the data: JSON, the same on all ranks.
    """
    shards = weights_of(parameters, network) | state_of(parameters, optimizer, network)
    return _write(folder, step, shards, network, network.host_group, progress, said_of(optimizer), keep, best)


class CheckpointWriter:
    """Writes checkpoints in a thread while training continues, one at a time. All ranks make the same calls."""

    def __init__(self, folder: Path, network: Network, keep: int) -> None:
        self._folder = folder
        self._network = network
        self._keep = keep
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        # A separate group, created by all ranks together: two threads of a rank must not communicate in one group.
        self._host_group = network.new_host_group()

    def save(
        self,
        step: int,
        parameters: Parameters,
        optimizer: Optimizer,
        progress: Mapping[str, Any],
        best: int | None = None,
    ) -> None:
        """Copy everything now, and write it later. Of older checkpoints the newest and that of step `best` are kept."""
        self.wait()
        shards = weights_of(parameters, self._network) | state_of(parameters, optimizer, self._network)
        copies = {name: replace(shard, local=shard.local.to("cpu", copy=True)) for name, shard in shards.items()}
        said = said_of(optimizer)
        arguments = self._folder, step, copies, self._network, self._host_group, progress, said, self._keep, best
        # A rank that fails because another is gone must not wait for this thread, which waits for that rank, too.
        self._thread = threading.Thread(target=self._work, args=arguments, name="cubeloom checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last one is complete; raise the error that prevented it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _work(self, *arguments: Any) -> None:
        try:
            _write(*arguments)
        except BaseException as error:  # raised in the training thread
            self._failure = error


def _write(
    folder: Path,
    step: int,
    shards: Mapping[str, Shard],
    network: Network,
    host_group: HostGroup,
    progress: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    keep: int,
    best: int | None = None,
) -> Path:
    final = folder / name_of_step(step)
    writing = folder / f".{final.name}"
    what = f"the checkpoint {final} could not be written"
    host_group.follow_first(lambda: retried(what, lambda: _make_folder(writing)))
    mine, index = assign(shards, host_group)

    def write_mine() -> dict[str, str]:
        wrote = retried(what, lambda: write_blocks(writing, network.rank, mine, index))
        # Each rank reads its own files back, so that no rank reads them all.
        return {file.name: checksum(file) for file in wrote}

    wrote = host_group.gather(host_group.agree(write_mine))

    def finish() -> None:
        checksums = {name: each for theirs in wrote for name, each in theirs.items()}
        named = {*files_of(read_index(writing)), INDEX}
        retried(what, lambda: seal(writing, step, progress, optimizer, checksums, named))
        retried(what, lambda: _put_in_place(writing, final))
        retried(what, lambda: sync_names(folder))  # before the checkpoints that it replaces are removed
        for old in checkpoints(folder)[:-keep]:
            if best is None or old.name != name_of_step(best):
                shutil.rmtree(old, ignore_errors=True)
        sweep(folder)

    host_group.follow_first(finish)
    return final


def _make_folder(writing: Path) -> None:
    if writing.exists():
        shutil.rmtree(writing)
    writing.mkdir(parents=True)


def _put_in_place(writing: Path, final: Path) -> None:
    if (
        writing.exists() or not final.exists()
    ):  # otherwise an earlier try did it, although the file server reported an error
        replace_folder(writing, final)


def sweep(folder: Path) -> None:
    """Remove the remains of crashed saves: only one save runs at a time, and none when this is called."""
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)
