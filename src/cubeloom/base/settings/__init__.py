"""Settings from a file: TOML that may extend another file, or a Python recipe; with overrides, types, and helpful
errors.
"""

from cubeloom.base.settings.comment import commented as commented
from cubeloom.base.settings.describe import Section as Section
from cubeloom.base.settings.describe import Setting as Setting
from cubeloom.base.settings.describe import all_settings as all_settings
from cubeloom.base.settings.describe import sections as sections
from cubeloom.base.settings.load import load as load
from cubeloom.base.settings.write import write as write
