"""Cubeloom: train neural networks that are too large for one device."""

from cubeloom.errors import UserError as UserError
from cubeloom.grid import Grid as Grid

__version__ = "0.1.0"
