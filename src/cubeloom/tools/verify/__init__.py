"""Is training on a grid the same as training the serial model? Run both and compare."""

from cubeloom.tools.verify.experiment import Experiment as Experiment
from cubeloom.tools.verify.report import Report as Report
from cubeloom.tools.verify.report import verify as verify
