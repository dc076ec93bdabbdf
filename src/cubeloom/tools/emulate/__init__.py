"""Ranks that sleep instead of computing, so that two cores can emulate a cluster and measure how long its steps take."""

from cubeloom.tools.emulate.events import Program as Program
from cubeloom.tools.emulate.pipeline import EmulatedPipeline as EmulatedPipeline
from cubeloom.tools.emulate.rank import EmulatedRank as EmulatedRank
from cubeloom.tools.emulate.rank import EmulatedStep as EmulatedStep
