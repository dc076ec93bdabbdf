"""Experiments of the three papers, simulated on models of their clusters: published figures beside ours.

reproduce("chimera").rows        # of Row: a published Point, ours, and whether the model was calibrated with it
page(reproduce("cube"))          # a self-contained page
"""

from __future__ import annotations

from typing import Literal, get_args

from cubeloom.plan.reproduce import chimera, cube, tensor3d
from cubeloom.plan.reproduce.page import page as page
from cubeloom.plan.reproduce.report import Point as Point
from cubeloom.plan.reproduce.report import Report as Report
from cubeloom.plan.reproduce.report import Row as Row

Paper = Literal["cube", "chimera", "tensor3d"]
PAPERS = get_args(Paper)


def reproduce(paper: Paper) -> Report:
    return {"cube": cube, "chimera": chimera, "tensor3d": tensor3d}[paper].reproduce()
