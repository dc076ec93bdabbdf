"""Is training on a grid the same as training the serial model? Run both and compare."""

from cubeloom.verify.experiment import Experiment as Experiment
from cubeloom.verify.report import Report as Report
from cubeloom.verify.report import verify as verify
