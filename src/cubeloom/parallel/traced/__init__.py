"""Models without a hand-written cut: run without values, as serial model and as a rank, until every layer has a
placement.
"""

from cubeloom.parallel.traced.model import Traced as Traced
from cubeloom.parallel.traced.model import trace as trace
from cubeloom.parallel.traced.row import BlockOutput as BlockOutput
from cubeloom.parallel.traced.row import Row as Row
from cubeloom.parallel.traced.styles import Plan as Plan
from cubeloom.parallel.traced.tracing import Tracing as Tracing
