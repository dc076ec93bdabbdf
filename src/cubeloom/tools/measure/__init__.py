"""Trains the best plans of a search for some steps each, on this machine or the job that this process belongs to."""

from cubeloom.tools.measure.plans import Measured as Measured
from cubeloom.tools.measure.plans import Trained as Trained
from cubeloom.tools.measure.plans import measured as measured
from cubeloom.tools.measure.steps import step_times as step_times
