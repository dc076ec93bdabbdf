"""The search: every decomposition in closed form, the best simulated, and what is to be said of them."""

from cubeloom.plan.search.answer import Answer as Answer
from cubeloom.plan.search.answer import counts_that_work as counts_that_work
from cubeloom.plan.search.answer import on_devices as on_devices
from cubeloom.plan.search.answer import search as search
from cubeloom.plan.search.configuration import configuration as configuration
from cubeloom.plan.search.configuration import planned_dtype as planned_dtype
from cubeloom.plan.search.explain import explain as explain
from cubeloom.plan.search.explain import gains as gains
from cubeloom.plan.search.explain import why as why
from cubeloom.plan.search.found import Plan as Plan
from cubeloom.plan.search.strategies import Strategy as Strategy
from cubeloom.plan.search.strategies import different as different
from cubeloom.plan.search.strategies import usual as usual
from cubeloom.plan.search.strategies import usual_names as usual_names
from cubeloom.plan.search.strategies import usual_one as usual_one
