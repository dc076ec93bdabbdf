"""Serves the explorer to this machine alone."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from cubeloom.base.errors import UserError
from cubeloom.tools.explore.app import application


def serve(folder: Path, port: int, told: Callable[[str], None]) -> None:
    """Until Ctrl-C. `port` 0: any that is free. `told` gets the address once connections are accepted."""
    token = secrets.token_urlsafe(24)
    with listening(port) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/{token}/"
        config = uvicorn.Config(application(token, folder), log_level="warning", access_log=False)
        told(address)
        uvicorn.Server(config).run(sockets=[listener])


def listening(port: int) -> socket.socket:
    """A socket of the loopback interface."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise UserError(
            f"port {port} cannot be used: {error.strerror}; leave out --port, and any free one is"
        ) from None
    listener.listen(64)
    return listener
