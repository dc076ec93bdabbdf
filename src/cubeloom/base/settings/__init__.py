"""Settings from a file: TOML that may extend another, or a Python recipe, with overrides; typed, and refused with a hint."""

from cubeloom.base.settings.load import load as load
from cubeloom.base.settings.write import write as write
