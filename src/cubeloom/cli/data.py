"""`cubeloom data`: turns text into token folders, and shows what such a folder contains."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

if TYPE_CHECKING:
    from cubeloom.train.data import TokenFile
    from cubeloom.train.data.sources import Progress

_SECONDS_A_LINE = 10.0
_FEW = 4096
"""Below this many tokens a validation loss says little: it varies by a few hundredths between texts."""
_INTERRUPTED = 130  # as in shells


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Turn text, JSON lines (.jsonl, .json), Parquet (.parquet) or Arrow (.arrow) into a folder of memory-mapped
    tokens.

    Records with messages, or with a prompt and an answer, are conversations, of which only answers are targets. The
    folder is written atomically. If a run was interrupted, the same command resumes it.
    """

    inputs: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="INPUT...")]
    """Files, or datasets of Hugging Face's save_to_disk; a text file is one document, unless --separator is given."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o", "--out"])]
    """The folder to write."""
    tokenizer: str = "bytes"
    """bytes; bpe, which is trained on the input; or a Hugging Face tokenizer: its file, or a folder with it."""
    vocab: int | None = None
    """Vocabulary size of bpe, 16384 by default."""
    end: str | None = None
    """The token that ends a document; by default the one that the tokenizer's folder names, or one with a usual name.
    """
    field: str | None = None
    """The field of JSON lines, or the column of Parquet or Arrow, with the text; "text" by default. If it is given,
    records that look like conversations are text, too.
    """
    template: str | None = None
    """For conversations: plain, or a file with a chat template; by default that of the tokenizer's folder, otherwise
    plain.
    """
    separator: str | None = None
    """In text files, a line that equals this ends a document; '' for a blank line."""
    validation: float = 0.01
    """The share of documents that is kept for validation; if there are too few text files for that, this share of the
    tokens, from the end.
    """
    force: bool = False
    """Replace tokens of another request."""
    json: Annotated[bool, tyro.conf.arg(aliases=["-j"])] = False
    """Print one JSON object as the last line."""

    def __call__(self) -> int:
        from cubeloom.train.data import Request, prepare

        request = Request(
            inputs=self.inputs,
            tokenizer=self.tokenizer,
            vocabulary=self.vocab,
            end=self.end,
            field=self.field,
            template=self.template,
            separator=self.separator,
            validation=self.validation,
        )
        console = Console(stderr=self.json)
        try:
            with shown(console) as progress:
                done = prepare(request, self.output, force=self.force, progress=progress)
        except KeyboardInterrupt:
            console.print("interrupted; the same command resumes")
            return _INTERRUPTED
        console.print(f"{self.output}: {done.how}", highlight=False)
        tell(console, done.file)
        if self.validation and done.file.meta.validation.tokens < _FEW:
            console.print(_few(done.file), highlight=False, soft_wrap=True)
        if self.json:
            print(json.dumps({"how": done.how, **as_json(done.file)}))
        return 0


@dataclass(frozen=True, kw_only=True)
class Show:
    """Show what is in a token folder, and check its files. Exits 1 if one has changed since it was written."""

    folder: tyro.conf.Positional[Path]
    json: Annotated[bool, tyro.conf.arg(aliases=["-j"])] = False
    """Print one JSON object as the last line."""

    def __call__(self) -> int:
        from cubeloom.train.data import TokenFile

        file = TokenFile(self.folder)
        damaged = file.damaged()
        console = Console(stderr=self.json)
        tell(console, file)
        console.print(f"DAMAGED: {', '.join(damaged)}" if damaged else "every file is as it was written")
        if self.json:
            print(json.dumps({"ok": not damaged, **as_json(file)}))
        return 1 if damaged else 0


Data = Annotated[Prepare, tyro.conf.subcommand("prepare")] | Annotated[Show, tyro.conf.subcommand("show")]


def tell(console: Console, file: TokenFile) -> None:
    meta = file.meta
    table = Table("", "documents", "tokens")
    for name, part in (("training", meta.training), ("validation", meta.validation)):
        table.add_row(name, f"{part.documents:,}", f"{part.tokens:,}")
    console.print(table)
    kind = meta.request["tokenizer"]["kind"]
    console.print(f"a vocabulary of {meta.vocabulary:,} ({kind}), kept as {meta.dtype}", highlight=False)
    if meta.counted:
        console.print("conversations: only answers count as targets", highlight=False)


def _few(file: TokenFile) -> str:
    meta = file.meta
    return (
        f"WARNING: validation has {meta.validation.tokens:,} of {meta.tokens:,} tokens, so few that its loss says little; "
        "a larger share, as --validation 0.1 --force, gives more"
    )


def as_json(file: TokenFile) -> dict[str, Any]:
    meta = file.meta
    return {
        "folder": str(file.folder),
        "vocabulary": meta.vocabulary,
        "end": meta.end,
        "dtype": meta.dtype,
        "tokens": {"training": meta.training.tokens, "validation": meta.validation.tokens},
        "documents": {"training": meta.training.documents, "validation": meta.validation.documents},
        "tokenizer": meta.tokenizer,
        "answers_only": meta.counted,
        "sha256": meta.sha256,
    }


@contextmanager
def shown(console: Console) -> Iterator[Progress]:
    """A bar on a terminal; otherwise an occasional line, and one when something is done."""
    if not console.is_terminal:
        yield lines(console)
        return
    with Bar(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console
    ) as bar:
        tasks: dict[str, TaskID] = {}

        def draw(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=total)

        yield draw


def lines(console: Console) -> Progress:
    said = time.monotonic()

    def say(what: str, done: int, total: int) -> None:
        nonlocal said
        if done == total or time.monotonic() - said > _SECONDS_A_LINE:
            said = time.monotonic()
            console.print(f"{what}: {done:,} of {total:,} bytes", highlight=False)

    return say
