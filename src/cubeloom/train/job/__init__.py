"""A job: all that a settings file says of a run, typed and frozen; the same for planning, verifying and training."""

from cubeloom.train.job.check import check as check
from cubeloom.train.job.job import Job as Job
from cubeloom.train.job.rates import Rate as Rate
