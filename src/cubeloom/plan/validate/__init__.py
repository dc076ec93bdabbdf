"""Hold the planner against measured steps: its own functions predict them, and never see the times that they are judged on.

report = validate(Path("judged.csv"))                         # nothing is fitted
report = validate(Path("judged.csv"), Path("others.csv"))     # three constants are, on the times of the others
"""

from cubeloom.plan.validate.fit import Constants as Constants
from cubeloom.plan.validate.fit import fit as fit
from cubeloom.plan.validate.judge import Verdict as Verdict
from cubeloom.plan.validate.judge import judge as judge
from cubeloom.plan.validate.predict import Prediction as Prediction
from cubeloom.plan.validate.predict import predict as predict
from cubeloom.plan.validate.report import Report as Report
from cubeloom.plan.validate.report import measured as measured
from cubeloom.plan.validate.report import validate as validate
from cubeloom.plan.validate.runs import run_of as run_of
from cubeloom.plan.validate.table import Run as Run
from cubeloom.plan.validate.table import Skipped as Skipped
from cubeloom.plan.validate.table import read_rows as read_rows
from cubeloom.plan.validate.table import without_times as without_times
