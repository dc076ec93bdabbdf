"""Text from a trained model, in one process."""

from cubeloom.sample.continue_ import continue_ as continue_
from cubeloom.sample.trained import Trained as Trained
