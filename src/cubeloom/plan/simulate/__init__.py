"""Steps simulated action by action: the best plans of a search, and single plans rank by rank."""

from cubeloom.plan.simulate.fold import folded as folded
from cubeloom.plan.simulate.fold import schedule_of as schedule_of
from cubeloom.plan.simulate.ranks import simulate_ranks as simulate_ranks
from cubeloom.plan.simulate.run import Outcome as Outcome
from cubeloom.plan.simulate.run import StageTimes as StageTimes
from cubeloom.plan.simulate.run import simulate as simulate
