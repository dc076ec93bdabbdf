"""Ranks that wait instead of computing, so that two cores can host a cluster and show how long its steps would take."""

from cubeloom.tools.emulate.events import Program as Program
from cubeloom.tools.emulate.pipeline import EmulatedPipeline as EmulatedPipeline
from cubeloom.tools.emulate.rank import EmulatedRank as EmulatedRank
from cubeloom.tools.emulate.rank import Stepped as Stepped
