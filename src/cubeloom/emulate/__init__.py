"""Ranks that wait instead of computing, so that two cores can host a cluster and show how long its steps would take."""

from cubeloom.emulate.events import Program as Program
from cubeloom.emulate.pipeline import EmulatedPipeline as EmulatedPipeline
from cubeloom.emulate.rank import EmulatedRank as EmulatedRank
from cubeloom.emulate.rank import Stepped as Stepped
