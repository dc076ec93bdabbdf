"""A job: everything that a settings file says about a run, typed and frozen; the same for planning, verifying and
training.
"""

from typing import TYPE_CHECKING

from cubeloom.base.lazy import lazily

if TYPE_CHECKING:
    from cubeloom.train.job.checking import check as check
    from cubeloom.train.job.job import Job as Job
    from cubeloom.train.job.rates import Rate as Rate

__getattr__, __dir__ = lazily(__name__, __file__)
