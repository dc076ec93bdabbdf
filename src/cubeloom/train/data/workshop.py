"""The hidden folder in which a token folder is written, in the same parent folder."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cubeloom.base.errors import UserError
from cubeloom.base.file_errors import reason
from cubeloom.base.files import FULL, replace_folder, sync_names

_LOCK = "lock"


@contextmanager
def workshop(out: Path) -> Iterator[Path]:
    """A folder for one process at a time. It stays if the process is interrupted or a file cannot be read or written,
    so that the same command can resume; it is removed if the request is refused.
    """
    folder = out.with_name(f".{out.name}.partial")
    try:
        folder.mkdir(exist_ok=True)
        lock = (folder / _LOCK).open("w", encoding="utf-8")
    except OSError as error:
        raise _explained(error, out) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process is preparing {out}") from None
        try:
            yield folder
        except OSError as error:
            raise _explained(error, out) from None
        except UserError:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def empty(folder: Path) -> None:
    """Remove the remains of another request."""
    for path in folder.iterdir():
        if path.name != _LOCK:
            path.unlink()


def publish(folder: Path, out: Path) -> None:
    """Rename a finished folder to its final name, atomically replacing an existing one."""
    (folder / _LOCK).unlink()
    replace_folder(folder, out)
    sync_names(out.parent)


def _explained(error: OSError, out: Path) -> UserError:
    if error.errno in FULL:
        return UserError(f"the disk of {out.parent} is full; with more room the same command resumes")
    return UserError(f"cannot write {out}: {reason(error)}; the same command resumes")
