"""Rules of the house that no linter knows. Run by `make check`; prints what breaks them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "cubeloom"
FILE_LINES, FUNCTION_LINES = 400, 60
# Distributed tensors are values, with nothing to do with process groups.
VALUES = ("torch.distributed.tensor",)
# What starts processes, and joins nothing.
AGENT = ("torch.distributed.launcher", "torch.distributed.elastic")
ALSO = {"launch": AGENT, "base/torch_private.py": (*AGENT, "torch.distributed.distributed_c10d")}
DEVICE_WORDS = {"cuda", "nccl", "gloo"}
# What executes what it reads; and who may, since it reads what the user named, or what its own processes wrote in a pipe.
EXECUTING = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "runpy", "code", "imp"}
MAY_EXECUTE = {"base/settings/load.py": "runpy", "launch/pool.py": "pickle"}
# What torch has not promised stands here alone, with a test for each.
PRIVATE = "base/torch_private.py"
# Names with an underscore that Python promises; and those of torch's modules, which our own classes have, too.
PROMISED = {"_replace", "_asdict", "_fields", "_exit"}
OF_MODULES = {"_parameters", "_modules", "_buffers"}


def main() -> int:
    paths = sorted(SOURCE.rglob("*.py"))
    ours = {name for path in paths for name in defined(ast.parse(path.read_text()))}
    found = [f"{path.relative_to(SOURCE.parent)}:{problem}" for path in paths for problem in problems(path, ours)]
    for line in found:
        sys.stdout.write(line + "\n")
    sys.stdout.write(f"house rules: {len(found)} broken\n")
    return 1 if found else 0


def problems(path: Path, ours: set[str]) -> Iterator[str]:
    text = path.read_text()
    relative = path.relative_to(SOURCE).as_posix()
    part = relative.partition("/")[0]
    private_allowed = relative == PRIVATE
    if text.count("\n") > FILE_LINES:
        yield f"1 a file of {text.count(chr(10))} lines; does it have one concern?"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno > FUNCTION_LINES:
            yield f"{node.lineno} {node.name} has more than {FUNCTION_LINES} lines"
        if isinstance(node, ast.Global):
            yield f"{node.lineno} a global statement"
        if part != "comm":
            yield from outside_comm(node, (*VALUES, *ALSO.get(part, ()), *ALSO.get(relative, ())))
        if not private_allowed:
            yield from private(node, ours)
        yield from by_locale(node)
        yield from executing(node, MAY_EXECUTE.get(relative))
        if part != "launch" and isinstance(node, ast.Attribute) and node.attr == "environ":
            yield f"{node.lineno} os.environ outside launch"


def by_locale(node: ast.AST) -> Iterator[str]:
    """Text is UTF-8, whatever the machine's language is."""
    match node:
        case ast.Call(func=ast.Attribute(attr="read_text" | "write_text" as name), args=args, keywords=words):
            wanted = 0 if name == "read_text" else 1
            if len(args) <= wanted and not any(word.arg == "encoding" for word in words):
                yield f"{node.lineno} {name} without an encoding"
        case ast.Call(func=ast.Attribute(attr="open") | ast.Name(id="open"), args=args, keywords=words):
            modes = [arg.value for arg in args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            binary = any("b" in mode for mode in modes if set(mode) <= set("rwxab+t"))
            if not binary and not any(word.arg == "encoding" for word in words) and not _is_os(node.func):
                yield f"{node.lineno} open without an encoding"


def _is_os(called: ast.expr) -> bool:
    return isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "os"


def executing(node: ast.AST, allowed: str | None) -> Iterator[str]:
    """Nothing that is read from a file or a network may be executed: docs/security.md promises it."""
    names: list[str] = []
    match node:
        case ast.Import():
            names = [alias.name for alias in node.names if alias.name.partition(".")[0] in EXECUTING]
        case ast.ImportFrom(module=str(module)):
            names = [module] if module.partition(".")[0] in EXECUTING or "distributed.checkpoint" in module else []
        case ast.Call(func=ast.Name(id="eval" | "exec" | "compile" | "__import__" as called)):
            names = [called]
        case ast.Attribute(value=ast.Name(id="torch" | "np" | "numpy" as package), attr="load"):
            names = [f"{package}.load"]
    for name in names:
        if name != allowed:
            yield f"{node.lineno} {name} can execute what it reads"  # type: ignore[attr-defined]


def defined(tree: ast.AST) -> Iterator[str]:
    """The names that a file of ours gives to something."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                yield node.attr


def private(node: ast.AST, ours: set[str]) -> Iterator[str]:
    """Names with an underscore that are not ours: torch may change them at any time."""
    found: list[str] = []
    match node:
        case ast.Attribute(value=value, attr=name) if is_private(name) and name not in PROMISED:
            of_self = isinstance(value, ast.Name) and value.id == "self"
            found = [name] if name not in ours or (name in OF_MODULES and not of_self) else []
        case ast.Import():
            found = [alias.name for alias in node.names if any(map(is_private, alias.name.split(".")))]
        case ast.ImportFrom(module=str(module)) if module.startswith("torch"):
            whole = [f"{module}.{alias.name}" for alias in node.names]
            found = [name for name in whole if any(map(is_private, name.split(".")))]
        case ast.Constant(value=str(text)) if text.startswith("torch._"):
            found = [text]
    for name in found:
        yield f"{node.lineno} {name} is private: use it in {PRIVATE}, with a test"  # type: ignore[attr-defined]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def outside_comm(node: ast.AST, allowed: tuple[str, ...]) -> Iterator[str]:
    """`comm` is the only door to torch.distributed, and the only place that names a device or a backend."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        if name.startswith("torch.distributed") and not name.startswith(allowed):
            yield f"{node.lineno} imports {name}, which is comm's"  # type: ignore[attr-defined]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in DEVICE_WORDS:
        yield f"{node.lineno} names {node.value!r}, which is comm's to name"


if __name__ == "__main__":
    sys.exit(main())
