"""The report of a plan, as a page."""

from cubeloom.plan.report.page import page as page
