"""The sbatch script of a job: a pure function of its size and of the user's options."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from cubeloom.base.errors import UserError
from cubeloom.base.limits import within

INTERRUPTED = 75
"""The exit code of a rank that was told to stop and has written a checkpoint: sysexits.h's "try again later"."""
_EARLY = 60  # seconds: Slurm may send the signal this much earlier than requested
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class SlurmScript:
    """A job on a Slurm cluster: one task per rank."""

    name: str
    command: tuple[str, ...]
    """The command of each rank."""
    nodes: int
    ranks_per_node: int
    gpus: bool
    """Whether each rank needs a GPU."""
    folder: Path
    """The ranks' working directory, so that relative paths mean the same as here."""
    programs: Path
    """The folder of the `cubeloom` command, put first on the path."""
    cpus_per_rank: int = 1
    """Slurm gives a task one core by default: threads for data, checkpoints and messages would share it."""
    time: str = "24:00:00"
    partition: str | None = None
    account: str | None = None
    restarts: int = 3
    """How often a failed step is restarted within the job."""
    notice: int = 180
    """Seconds before the time limit at which ranks are told to write a checkpoint and stop."""

    def __post_init__(self) -> None:
        for option, value in (("partition", self.partition), ("account", self.account)):
            if value is not None and not re.fullmatch(r"[\w.,@+-]+", value, re.ASCII):
                raise UserError(f"--{option} {value!r} is no name of one: letters, digits and . , @ + - _")
        within("--cpus-per-rank", self.cpus_per_rank)
        if self.notice < 1 or seconds(self.time) <= self.notice + _EARLY:
            raise UserError(
                f"--time {self.time}: ranks are told to stop {self.notice} s before the end, or up to {_EARLY} s earlier, and "
                "would never get to work; give more time, or --notice less"
            )

    def text(self) -> str:
        return "\n".join([*self._options(), "", *self._environment(), "", *self._steps()]) + "\n"

    def _options(self) -> list[str]:
        where = [("partition", self.partition), ("account", self.account)]
        return [
            "#!/bin/bash",
            f"#SBATCH --job-name={self.name}",
            *(f"#SBATCH --{option}={value}" for option, value in where if value is not None),
            f"#SBATCH --nodes={self.nodes}",
            "# One task a rank" + (", and one GPU." if self.gpus else "."),
            f"#SBATCH --ntasks-per-node={self.ranks_per_node}",
            f"#SBATCH --cpus-per-task={self.cpus_per_rank}",
            *([f"#SBATCH --gpus-per-node={self.ranks_per_node}"] if self.gpus else []),
            "# So many seconds before the limit, ranks are told to write a checkpoint and stop.",
            f"#SBATCH --time={self.time}",
            # Not TERM: after it a rank has only as long as its sender waits before killing it.
            f"#SBATCH --signal=USR1@{self.notice}",
            "# After a preemption or the loss of a node Slurm starts this script again, and its output goes on.",
            "#SBATCH --requeue",
            "#SBATCH --open-mode=append",
            f"#SBATCH --output={self.name}-%j.log",
        ]

    def _environment(self) -> list[str]:
        return [
            f"cd -- {shlex.quote(str(self.folder))} || exit",
            "# The environment that wrote this script; it must be the same path on every node.",
            f'export PATH={shlex.quote(str(self.programs))}:"$PATH"',
            "# Ranks are processes: one thread each, or they fight for the cores.",
            "export OMP_NUM_THREADS=1",
            "# What a rank says appears when it says it.",
            "export PYTHONUNBUFFERED=1",
        ]

    def _steps(self) -> list[str]:
        return [
            f"# A step that fails is restarted from the last checkpoint, {self.restarts} times.",
            "# Input that cannot work (2) never will. Once a rank has ended, the others have a minute to end too.",
            f"for attempt in {{0..{self.restarts}}}; do",
            # Since Slurm 22.05 a step does not inherit this from the job.
            f"    srun --cpus-per-task={self.cpus_per_rank} --kill-on-bad-exit=0 --wait=60 {shlex.join(self.command)}",
            "    code=$?",
            f"    case $code in 0 | 2 | {INTERRUPTED}) break ;; esac",
            '    echo "attempt $attempt ended with $code" >&2',
            "done",
            "",
            "# Ranks that were told to stop are not done: queue for more time, unless somebody cancelled the job.",
            'state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)',
            f'if [ $code = {INTERRUPTED} ] && [ "$state" = RUNNING ]; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            "exit $code",
        ]


def seconds(time: str) -> int:
    """Seconds of a limit in Slurm's format: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    found = _TIME.fullmatch(time)
    if found is None:
        raise UserError(f"--time {time!r} should read as Slurm's do: 30 (minutes), 24:00:00 or 2-12 (days and hours)")
    first, second, third = (int(found[name] or 0) for name in ("first", "second", "third"))
    if found["days"] is not None:
        return ((int(found["days"]) * 24 + first) * 60 + second) * 60 + third
    if found["third"] is not None:
        return (first * 60 + second) * 60 + third
    return first * 60 + second
