"""`cubeloom doctor`: inspects this machine and the communication of ranks on it, and says what is wrong."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cubeloom.base.errors import UserError
from cubeloom.base.units import bytes_, rate, seconds

if TYPE_CHECKING:
    from cubeloom.tools.doctor import Facts, Finding

_COLOURS = {"wrong": "bold red", "doubtful": "yellow", "fine": "green"}
_MOST = 64


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Inspect this machine, let ranks communicate for a few seconds, and say what is wrong and what to do.

    Exits 1 if something is wrong, 0 if findings are only doubtful or fine.
    """

    ranks: int = 2
    """The number of ranks that will communicate, and train, on this machine."""
    json: Annotated[bool, tyro.conf.arg(aliases=["-j"])] = False
    """Print one JSON object as the last line."""

    def __call__(self) -> int:
        if not 2 <= self.ranks <= _MOST:
            raise UserError(f"--ranks {self.ranks}: from 2, who talk to each other, to {_MOST}")
        from cubeloom.tools.doctor import examine, gather

        facts = gather(self.ranks, Path.cwd())
        findings = examine(facts)
        console = Console(stderr=self.json)
        console.print(facts_table(facts), links_table(facts), findings_table(findings), sep="\n")
        counts = Counter(finding.severity for finding in findings)
        console.print(f"{counts['wrong']} wrong, {counts['doubtful']} doubtful, {counts['fine']} fine", highlight=False)
        ok = not counts["wrong"]
        if self.json:
            print(json.dumps(as_json(facts, findings)))
        return 0 if ok else 1


def facts_table(facts: Facts) -> Table:
    from cubeloom.tools.doctor.environment_checks import relevant

    table = Table(title="This machine", show_header=False)
    machine = facts.machine
    rows = {
        "system": machine.system,
        "cores": str(machine.cores),
        "memory": f"{bytes_(machine.memory_free)} free of {bytes_(machine.memory)}",
        "devices": ", ".join(
            f"{each.name} with {bytes_(each.memory_free)} free of {bytes_(each.memory)}"
            for each in facts.devices.accelerators
        )
        or "no GPU",
        "driver, CUDA of torch": f"{facts.devices.driver or '-'}, {facts.devices.runtime or '-'}",
        "versions": ", ".join(f"{name} {version or '-'}" for name, version in facts.versions.items()),
        "disk": f"{bytes_(machine.disk.free)} free at {machine.disk.path}",
        "shared memory": "-" if machine.shared_memory is None else f"{bytes_(machine.shared_memory.free)} free",
        "open files": f"at most {machine.open_files}",
        "clock": f"ticks every {seconds(facts.clocks.resolution)}",
        "interfaces": ", ".join(machine.interfaces),
        "environment": "\n".join(f"{name}={value}" for name, value in relevant(facts.variables).items()) or "-",
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def links_table(facts: Facts) -> Table:
    table = Table(
        "backend",
        "version",
        "ranks",
        "a message",
        "between two",
        "all-reduce",
        "clocks apart",
        title="Ranks of this machine",
        box=None,
        pad_edge=False,
    )
    for link in facts.links:
        measured = (seconds(link.latency), rate(link.bandwidth), rate(link.all_reduce))
        apart = f"{seconds(abs(link.skew))} ± {seconds(link.skew_error)}"
        shown = (*measured, apart) if link.failure is None else ("-",) * 4
        table.add_row(link.backend, link.version or "-", str(link.ranks), *shown)
    return table


def findings_table(findings: list[Finding]) -> Table:
    table = Table("", "subject", "what", "what to do", title="Findings")
    for each in findings:
        colour = _COLOURS[each.severity]
        table.add_row(f"[{colour}]{each.severity}[/]", each.subject, escape(each.what), escape(each.remedy))
    return table


def as_json(facts: Facts, findings: list[Finding]) -> dict[str, Any]:
    """Only environment variables that matter to a job: the others may hold secrets."""
    from cubeloom.tools.doctor.environment_checks import relevant

    return {
        "ok": all(finding.severity != "wrong" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        **asdict(facts),
        "variables": relevant(facts.variables),
    }
