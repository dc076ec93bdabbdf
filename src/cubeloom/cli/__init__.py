"""The command line: one file a command, each a frozen dataclass of its options that is called to run."""

from __future__ import annotations

import sys
from typing import Annotated

import tyro

from cubeloom.cli.data import Data
from cubeloom.cli.models import Models
from cubeloom.cli.schedule import Schedule
from cubeloom.cli.verify import Verify
from cubeloom.errors import UserError

Command = (
    Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Schedule, tyro.conf.subcommand("schedule")]
    | Annotated[Models, tyro.conf.subcommand("models")]
    | Annotated[Data, tyro.conf.subcommand("data", description="Make and check folders of tokens.")]
)


def main() -> None:
    """Train neural networks that are too large for one device."""
    # Exit 0 if the command succeeded, 1 if what it checked does not hold, 2 if its input cannot work.
    command = tyro.cli(
        tyro.conf.OmitSubcommandPrefixes[Command],  # type: ignore[misc]
        prog="cubeloom",
        description=main.__doc__,
    )
    try:
        sys.exit(command())
    except UserError as error:
        print(f"cubeloom: {error}", file=sys.stderr)
        sys.exit(2)
