"""Text from a trained model, in one process."""

from cubeloom.tools.sample.continue_ import continue_ as continue_
from cubeloom.tools.sample.trained import Trained as Trained
