"""Rehearses a job: runs the real programs of its distinct ranks in one process, without a network, for any size."""

from cubeloom.tools.rehearse.memory import Memory as Memory
from cubeloom.tools.rehearse.memory import Tracker as Tracker
from cubeloom.tools.rehearse.plans import Rehearsed as Rehearsed
from cubeloom.tools.rehearse.plans import rehearsed as rehearsed
from cubeloom.tools.rehearse.program import measure as measure
from cubeloom.tools.rehearse.rehearsal import RankRun as RankRun
from cubeloom.tools.rehearse.rehearsal import Rehearsal as Rehearsal
from cubeloom.tools.rehearse.rehearsal import rehearse as rehearse
