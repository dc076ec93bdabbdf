"""Rehearse a job: the true programs of its distinct ranks in one process, without a network, at any size."""

from cubeloom.rehearse.memory import Memory as Memory
from cubeloom.rehearse.memory import Tracker as Tracker
from cubeloom.rehearse.plans import Rehearsed as Rehearsed
from cubeloom.rehearse.plans import rehearsed as rehearsed
from cubeloom.rehearse.program import measure as measure
from cubeloom.rehearse.rehearsal import RankRun as RankRun
from cubeloom.rehearse.rehearsal import Rehearsal as Rehearsal
from cubeloom.rehearse.rehearsal import rehearse as rehearse
