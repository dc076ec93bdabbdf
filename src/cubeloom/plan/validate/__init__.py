"""Fit the constants of a device and cluster on measured steps, and judge predictions of others.

constants = fit(read_runs(first), read_times(first), cluster("dgx-a100"))
predicted = step_seconds(constants, read_runs(second))     # runs carry no times
judge(predicted, read_times(second), read_runs(second))
"""

from cubeloom.plan.validate.fit import fit as fit
from cubeloom.plan.validate.judge import Verdict as Verdict
from cubeloom.plan.validate.judge import judge as judge
from cubeloom.plan.validate.step import Constants as Constants
from cubeloom.plan.validate.step import step_seconds as step_seconds
from cubeloom.plan.validate.table import Runs as Runs
from cubeloom.plan.validate.table import read_runs as read_runs
from cubeloom.plan.validate.table import read_times as read_times
