"""File system errors: which are temporary, and which the user must fix."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from cubeloom.base.errors import UserError, first_line

T = TypeVar("T")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No more can be written."""
CANNOT_WORK = (
    *FULL,
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
)
"""Permanent: another try, now or after a restart, gives the same error."""
MAY_PASS = (
    *(errno.ESTALE, errno.EIO, errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EREMOTEIO, errno.ENOLINK, errno.ENOLCK),
    *(errno.ETIMEDOUT, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    *(errno.ECONNRESET, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ENOTCONN, errno.ESHUTDOWN),
)
"""A file server that is busy, restarting or unreachable."""
PAUSES = (0.1, 0.4, 1.5)
"""Seconds before the second and each later try."""


class FilesFailed(RuntimeError):
    """A file could not be read or written, but may be later: the launcher should restart the job."""


def retried(what: str, work: Callable[[], T], also: tuple[int, ...] = ()) -> T:
    """The result of `work`, which is retried after temporary errors, and after those of `also`.

    Raises UserError if the request is invalid, and FilesFailed for any other file system error. Both begin with `what`,
    as in "the checkpoint X could not be written".
    """
    for pause in PAUSES:
        try:
            return work()
        except OSError as error:
            if error.errno not in (*MAY_PASS, *also):
                raise failure(what, error) from error
            time.sleep(pause)
    try:
        return work()
    except OSError as error:
        raise failure(what, error, len(PAUSES) + 1) from error


def failure(what: str, error: OSError, tries: int = 1) -> UserError | FilesFailed:
    words = f"{what}: {reason(error)}"
    if error.errno in CANNOT_WORK:
        return UserError(words)
    return FilesFailed(f"{words} (tried {tries} times)" if tries > 1 else words)


def reason(error: BaseException) -> str:
    """The system's message, and the file it is about."""
    if not isinstance(error, OSError) or error.errno is None:
        return first_line(error)
    if error.errno in FULL:
        return f"the disk is full ({error.strerror})"
    return f"{error.strerror}, {error.filename}" if error.filename else str(error.strerror)
