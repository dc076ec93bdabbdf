"""The report of a plan: as a page, and as lines of a terminal."""

from cubeloom.plan.report.page import page as page
from cubeloom.plan.report.words import words as words
