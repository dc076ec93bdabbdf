"""The files of torch's checkpoints, with a note of what the system said where one could not be written."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem


class NotingFiles(FileSystem):
    """Torch writes tensors in C++, and of an error there it says only at which byte it was."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[OSError] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        with io.BufferedWriter(_Noting(path, mode, self.errors)) as stream:
            yield cast(io.IOBase, stream)


class _Noting(io.FileIO):
    def __init__(self, path: str | os.PathLike[str], mode: str, errors: list[OSError]) -> None:
        self._errors = errors
        try:
            super().__init__(os.fspath(path), mode)
        except OSError as error:
            errors.append(error)
            raise

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self._errors.append(error)
            raise
