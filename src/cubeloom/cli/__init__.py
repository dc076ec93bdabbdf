"""The command line: one file a command, each a frozen dataclass of its options that is called to run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Annotated

import tyro

from cubeloom.cli.calibrate import Calibrate
from cubeloom.cli.convert import Convert
from cubeloom.cli.data import Data
from cubeloom.cli.doctor import Doctor
from cubeloom.cli.launch import Launch
from cubeloom.cli.models import Models
from cubeloom.cli.report import Report
from cubeloom.cli.sample import Sample
from cubeloom.cli.schedule import Schedule
from cubeloom.cli.train import Train
from cubeloom.cli.validate import Validate
from cubeloom.cli.verify import Verify
from cubeloom.errors import UserError
from cubeloom.job import Job

Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Sample, tyro.conf.subcommand("sample")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Convert, tyro.conf.subcommand("convert")]
    | Annotated[Verify, tyro.conf.subcommand("verify")]
    | Annotated[Schedule, tyro.conf.subcommand("schedule")]
    | Annotated[
        Launch,
        tyro.conf.subcommand("launch", description="Write the script or manifest that trains a job on a cluster."),
    ]
    | Annotated[Doctor, tyro.conf.subcommand("doctor")]
    | Annotated[Calibrate, tyro.conf.subcommand("calibrate")]
    | Annotated[Validate, tyro.conf.subcommand("validate")]
    | Annotated[Models, tyro.conf.subcommand("models")]
    | Annotated[Data, tyro.conf.subcommand("data", description="Make and check folders of tokens.")]
)

TAKE_A_FILE = ("train", "launch")


def main() -> None:
    """Train neural networks that are too large for one device."""
    # Exit 0 if the command succeeded, 1 if what it checked does not hold, 2 if its input cannot work.
    arguments, overrides = split(sys.argv[1:])
    command: Callable[[], int] = tyro.cli(
        tyro.conf.OmitSubcommandPrefixes[Command],  # type: ignore[misc]
        prog="cubeloom",
        description=main.__doc__,
        args=arguments,
    )
    try:
        if overrides:
            command = with_overrides(command, overrides)
        sys.exit(command())
    except UserError as error:
        print(f"cubeloom: {error}", file=sys.stderr)
        sys.exit(2)


def split(arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """A command's own options, and settings of its file: those with a dot or, as `--steps=5`, a field of a job."""
    fields = {field.name for field in dataclasses.fields(Job)}

    def is_setting(argument: str) -> bool:
        name, equals, _ = argument.removeprefix("--").partition("=")
        return argument.startswith("--") and bool(equals) and ("." in name or (takes_file and name in fields))

    takes_file = bool(arguments) and arguments[0] in TAKE_A_FILE
    return [each for each in arguments if not is_setting(each)], tuple(filter(is_setting, arguments))


def with_overrides(command: Callable[[], int], overrides: tuple[str, ...]) -> Callable[[], int]:
    if not hasattr(command, "overrides"):
        raise UserError(f"{overrides[0]} is a setting of a file, and this command takes no file")
    return dataclasses.replace(command, overrides=overrides)  # type: ignore[type-var]
