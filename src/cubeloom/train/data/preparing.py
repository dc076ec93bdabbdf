"""Writes text to a token folder: atomically, and resuming where an interrupted run stopped.

All work happens in a hidden folder beside the result. After each chunk a journal there records how much of the files is
valid. The folder gets its name when it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cubeloom.base.errors import UserError
from cubeloom.base.files import check_sealed, read_json, replace_bytes, replace_text, write_sealed
from cubeloom.train.data import hugging_face
from cubeloom.train.data.checked import sums
from cubeloom.train.data.chunks import Place, chunks
from cubeloom.train.data.meta import CHECKSUMS, COUNTED, DOCUMENTS, META, TOKENS, Meta, Part, token_dtype
from cubeloom.train.data.reading import Reading
from cubeloom.train.data.request import DEFAULT_VOCABULARY, Request
from cubeloom.train.data.sources import Progress, Source, describe, sha256
from cubeloom.train.data.token_file import TokenFile
from cubeloom.train.data.tokenizer import END, Tokenizer
from cubeloom.train.data.tokenizer_files import NAMES, TEMPLATE, TOKENIZER
from cubeloom.train.data.workshop import empty, publish, workshop
from cubeloom.train.data.writer import BEGIN, VALIDATION, State, Writer

_JOURNAL = "journal.json"
TRAINED_ON = 1 << 30
"""The most bytes that a tokenizer is trained on: the first part of each source, in proportion."""


@dataclass(frozen=True)
class Prepared:
    """The folder, and whether it was written now, resumed after an interruption, or existed before."""

    file: TokenFile
    how: Literal["written", "resumed", "already there"]


def prepare(request: Request, out: Path, *, force: bool = False, progress: Progress = lambda *_: None) -> Prepared:
    """Write the token folder `out`. An existing folder of the same request is left alone."""
    out = out.resolve()
    if not out.parent.is_dir():
        raise UserError(f"there is no folder {out.parent} to write {out.name} in")
    if out.exists() and not _is_ours(out):
        raise UserError(f"{out} is there, and is not a folder of tokens; choose another --out")
    sources = describe(request.inputs, progress)
    if not any(source.bytes for source in sources):
        raise _no_text(sources)
    template = request.chat_template(sources)
    wanted = request.as_json(sources, template)
    if (out / META).exists() and not force:
        there = TokenFile(out)
        if there.meta.request != wanted:
            raise UserError(f"{out} holds tokens of another request; replace it with --force, or choose another --out")
        return Prepared(there, "already there")
    with workshop(out) as folder:
        state = _journal(folder, wanted)
        if state is None:
            empty(folder)
        tokenizer = _tokenizer(request, request.reading(template, None), sources, folder, progress)
        if template is not None:
            replace_text(folder / TEMPLATE, template)
        reading, chat = request.reading(template, tokenizer), template is not None
        with Writer(folder, tokenizer, request.share, state or BEGIN, reading.chat) as writer:
            _fill(writer, reading, sources, folder, wanted, progress)
            if not writer.state.document:
                raise _no_text(sources)
            writer.finish()
        _describe_result(folder, tokenizer, writer.state, wanted, chat)
        for name in (_JOURNAL, *(VALIDATION + name for name in (TOKENS, DOCUMENTS, COUNTED))):
            (folder / name).unlink(missing_ok=True)
        publish(folder, out)
    return Prepared(TokenFile(out), "written" if state is None else "resumed")


def _no_text(sources: list[Source]) -> UserError:
    return UserError(f"there is no text in {', '.join(str(source.path) for source in sources)}")


def _is_ours(out: Path) -> bool:
    """Whether it is a token folder, damaged or not, or an empty folder."""
    return out.is_dir() and ((out / META).exists() or not any(out.iterdir()))


def _fill(
    writer: Writer, reading: Reading, sources: list[Source], folder: Path, wanted: dict[str, Any], progress: Progress
) -> None:
    total = sum(source.bytes for source in sources)
    while writer.state.source < len(sources):
        source = sources[writer.state.source]
        before = sum(earlier.bytes for earlier in sources[: writer.state.source])
        for chunk in chunks(source, writer.state.place, reading):
            writer.add(chunk.pieces, writer.state.source, chunk.after)
            _write_journal(folder, wanted, writer.state)
            progress("tokenizing", before + chunk.read, total)
        writer.next_source()


def _tokenizer(
    request: Request, reading: Reading, sources: list[Source], folder: Path, progress: Progress
) -> Tokenizer:
    if request.tokenizer != "bpe":
        made = request.made_tokenizer()
        for name, text in request.tokenizer_files.texts.items() if request.tokenizer_files else ():
            replace_text(folder / name, text)
        return made
    file = folder / TOKENIZER
    if not file.exists():
        texts = _training_texts(reading, sources, progress)
        replace_text(file, hugging_face.train(texts, request.vocabulary or DEFAULT_VOCABULARY))
    return hugging_face.HuggingFace(file)


def _training_texts(reading: Reading, sources: list[Source], progress: Progress) -> Iterator[str]:
    whole = sum(source.bytes for source in sources)
    parts = [source.bytes * min(whole, TRAINED_ON) // whole for source in sources]
    for index, (source, part) in enumerate(zip(sources, parts, strict=True)):
        for chunk in chunks(source, Place(), reading):
            for piece in chunk.pieces:  # of a conversation without the end tokens that its template writes
                yield from [piece.text] if piece.marked is None else piece.text.split(END)
            progress("training the tokenizer", sum(parts[:index]) + min(chunk.read, part), sum(parts))
            if chunk.read >= part:
                break


def _write_journal(folder: Path, wanted: dict[str, Any], state: State) -> None:
    write_sealed(folder / _JOURNAL, {"request": wanted, "state": asdict(state)})


def _journal(folder: Path, wanted: dict[str, Any]) -> State | None:
    """The state to resume from, if the journal is of this request."""
    file = folder / _JOURNAL
    if not file.exists():
        return None
    try:
        found = read_json(file)
        check_sealed(file, found)
    except UserError:
        return None
    if found["request"] != wanted:
        return None
    state = found["state"]
    return State(
        **state
        | {
            "place": Place(**state["place"]),
            "training": Part(**state["training"]),
            "validation": Part(**state["validation"]),
        }
    )


def _describe_result(folder: Path, tokenizer: Tokenizer, state: State, wanted: dict[str, Any], counted: bool) -> None:
    numbers = (TOKENS, DOCUMENTS, *([COUNTED] if counted else []))
    replace_bytes(folder / CHECKSUMS, b"".join(sums(folder / name).tobytes() for name in numbers))
    names = [name for name in (*numbers, CHECKSUMS, *NAMES) if (folder / name).exists()]
    Meta(
        vocabulary=tokenizer.vocabulary,
        end=tokenizer.end,
        dtype=token_dtype(tokenizer.vocabulary).name,
        training=state.training,
        validation=state.validation,
        tokenizer=tokenizer.fingerprint,
        sha256={name: sha256(folder / name)[1] for name in names},
        request=wanted,
        counted=counted,
    ).write(folder)
