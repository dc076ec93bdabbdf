"""The command line: one file per command, each a frozen dataclass of its options that is called to run.

Only the requested command is imported, and no command imports torch to define its options: help and errors appear at
once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

from cubeloom.base.errors import UserError
from cubeloom.base.file_errors import FULL
from cubeloom.cli.groups import COMMANDS as COMMANDS
from cubeloom.cli.groups import overview, refuse_unknown


def main() -> None:
    """Train neural networks that are too large for one device. --version prints the version."""
    # Exit 0 if the command succeeded, 1 if what it checked does not hold, 2 if its input is invalid, 130 after Ctrl-C.
    with _errors_in_one_line():
        sys.exit(_run(sys.argv[1:]))


def _run(given: list[str]) -> int:
    if given == ["--version"]:
        from cubeloom.base.host import version

        print(f"cubeloom {version('cubeloom') or 'of no version: it is not installed'}")
        return 0
    if not given or given[0] in ("--help", "-h"):
        print(overview())
        return 0
    name, *rest = given
    refuse_unknown(name)
    return _command(name, rest)()


def _command(name: str, rest: list[str]) -> Callable[[], int]:
    import tyro

    from cubeloom.cli import options, words

    kind = getattr(import_module(f"cubeloom.cli.{name}"), name.capitalize())
    own, overrides = words.split(name, rest)
    words.refuse_unknown(name, {"--help", *options.names(kind)}, own)
    try:
        command: Callable[[], int] = tyro.cli(
            options.described(kind),
            config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff),
            prog=f"cubeloom {name}",
            description=None if isinstance(kind, type) else COMMANDS[name],
            args=own,
        )
    except SystemExit as left:
        if not left.code and name in words.TAKE_A_FILE:
            from cubeloom.cli.settings import as_options

            print(as_options())
        raise
    return words.with_overrides(command, overrides) if overrides else command


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """User errors, and a full disk, are reported in one line without a traceback."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()  # here, where a failure can still be reported
    except UserError as error:
        print(f"cubeloom: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("cubeloom: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:  # the reader has stopped reading, as `head` does
        _forget_output()
        sys.exit(128 + signal.SIGPIPE)
    except OSError as error:
        if error.errno not in FULL:
            raise
        _forget_output()
        print(f"cubeloom: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def _forget_output() -> None:
    """Python writes remaining output when it ends, and would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
