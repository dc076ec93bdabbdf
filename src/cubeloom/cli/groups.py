"""The commands, with the groups and descriptions that `cubeloom --help` shows."""

from __future__ import annotations

import difflib

from cubeloom.base.errors import UserError

# Each is a class in the module with its name.
GROUPS = {
    "Train": {
        "init": "Write a settings file, from questions or from options.",
        "train": "Train from a settings file, or resume the run in its folder.",
        "settings": "Print every setting with type, default, choices and meaning.",
        "data": "Turn text into a token folder, and check such a folder.",
        "models": "List the presets, with their sizes.",
        "sample": "Continue a text with a trained model.",
        "evaluate": "Print the loss of a trained model on validation data.",
        "report": "Write an HTML page of a run: curves, a measured step, events.",
        "convert": "Import weights from a Hugging Face folder, or export them.",
    },
    "Understand": {
        "verify": "Train serially and on a grid, and compare gradients and bytes.",
        "explore": "Serve plans, schedules, layouts and runs on one local page.",
        "schedule": "Make, check, time, draw and compare pipeline schedules.",
        "rehearse": "Run the ranks of a job of any size here, without a network.",
        "doctor": "Say what is wrong with this machine, and what to do.",
    },
    "Plan": {
        "plan": "Find the best grid, schedule and layout for a model on a cluster.",
        "calibrate": "Measure this machine, as a cluster for the planner.",
        "validate": "Fit the planner on measured steps, and judge it on others.",
        "reproduce": "Simulate the experiments of the three papers.",
    },
    "Cluster": {
        "launch": "Train on a cluster: Slurm, Kubernetes or Ray.",
    },
}
COMMANDS = {name: about for group in GROUPS.values() for name, about in group.items()}
ABOUT = "Train neural networks that are too large for one device."


def overview() -> str:
    """The output of `cubeloom` alone, in 80 columns."""
    width = max(map(len, COMMANDS))
    lines = ["usage: cubeloom COMMAND [OPTION ...]", "", ABOUT]
    for group, commands in GROUPS.items():
        lines += ["", group, *(f"  {name:{width}}  {about}" for name, about in commands.items())]
    lines += [
        "",
        "`cubeloom COMMAND --help` describes a command; `cubeloom --version` the version.",
        "First: `cubeloom init`, then `cubeloom train FILE`.",
    ]
    return "\n".join(lines)


def refuse_unknown(name: str) -> None:
    """Raises UserError with the nearest command."""
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise UserError(f"there is no command {name!r}{hint} There are {', '.join(COMMANDS)}")
