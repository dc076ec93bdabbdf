"""The report of a plan: as a page, as JSON for pages, and as lines of a terminal."""

from cubeloom.plan.report.view import page as page
from cubeloom.plan.report.words import words as words
