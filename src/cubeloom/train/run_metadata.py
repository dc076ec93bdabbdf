"""What is stored with a run: its resolved settings and its environment."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from cubeloom.base.errors import UserError
from cubeloom.base.file_errors import retried
from cubeloom.base.files import replace_text
from cubeloom.base.host import version
from cubeloom.base.settings import write
from cubeloom.train.data import TokenFile, Tokenizer, kept_tokenizer
from cubeloom.train.data.meta import META
from cubeloom.train.data.sources import sha256
from cubeloom.train.job import Job
from cubeloom.train.job.images import SUFFIX
from cubeloom.train.job.settings import Source
from cubeloom.train.job.streams import tokenizer_of

SETTINGS, ENVIRONMENT = "settings.toml", "environment.json"


def write_run_metadata(job: Job) -> None:
    def keep() -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        replace_text(job.folder / SETTINGS, write(job))
        replace_text(job.folder / ENVIRONMENT, json.dumps(environment(job), indent=1) + "\n")
        for source in job.data.sources[:1]:  # all have the same tokenizer
            if (found := _tokenizer(source)) is not None:
                kept_tokenizer.keep(*found, job.folder)

    retried(f"folder = {str(job.folder)!r} cannot be written to", keep)


def settings_of(run: Path) -> Path:
    """The settings file of a run. Raises UserError that says what a run is."""
    if run.is_file():
        raise UserError(
            f"{run} is a file, and a run is a folder: give the `folder` of its settings, such as runs/quick"
        )
    if not run.is_dir():
        raise UserError(
            f"there is no folder {run}: `cubeloom train FILE` writes a run into the `folder` of its settings"
        )
    if not (run / SETTINGS).exists():
        raise UserError(f"{run} is not the folder of a run: it has no {SETTINGS}")
    return run / SETTINGS


def settings_before(folder: Path) -> str:
    """The settings of the previous attempt; empty if there was none or it left nothing readable."""
    with suppress(OSError, ValueError):
        return (folder / SETTINGS).read_text(encoding="utf-8")
    return ""


def environment_before(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def from_run(run: Path, path: Path) -> Path:
    """A path of a run's settings, relative to where the run was started; or to here, if that is unknown or has moved."""
    with suppress(KeyError, TypeError):
        there = Path(environment_before(run)["directory"]) / path
        if there.exists():
            return there
    return path


def code_versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cubeloom": version("cubeloom") or "not installed",
    }


def environment(job: Job) -> dict[str, Any]:
    return {
        "command": " ".join(sys.argv),
        "directory": str(Path.cwd()),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": platform.platform(),
        **code_versions(),
        # The tokens' own hashes: another text under the same name makes another run.
        "data": {str(each.folder or each.stream): _data(each) for each in job.data.sources},
    }


def _data(source: Source) -> dict[str, str]:
    """The hashes of its files; of a stream only the tokenizer's is known."""
    if source.stream is not None:
        return {"tokenizer": tokenizer_of(source)[0].fingerprint}
    images = sorted(source.tokens.glob(f"*{SUFFIX}"))
    return {file.name: sha256(file)[1] for file in images} if images else TokenFile(source.tokens).meta.sha256


def _tokenizer(source: Source) -> tuple[Tokenizer, Mapping[str, str]] | None:
    """None for images."""
    if source.stream is not None:
        return tokenizer_of(source)
    if not (source.tokens / META).is_file():
        return None
    tokens = TokenFile(source.tokens)
    return tokens.tokenizer, tokens.tokenizer_texts
