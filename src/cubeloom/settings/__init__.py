"""Settings from a file: TOML that may extend another, or a Python recipe, with overrides; typed, and refused with a hint."""

from cubeloom.settings.load import load as load
from cubeloom.settings.write import write as write
