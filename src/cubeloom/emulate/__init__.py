"""Ranks that wait instead of computing, so that two cores can host a cluster and show how long its steps would take."""

from cubeloom.emulate.pipeline import EmulatedPipeline as EmulatedPipeline
