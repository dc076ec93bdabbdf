"""The loss of a trained model on data that it was not trained on, from a checkpoint, on any grid."""

from cubeloom.tools.evaluate.evaluate import Evaluated as Evaluated
from cubeloom.tools.evaluate.evaluate import Evaluation as Evaluation
from cubeloom.tools.evaluate.evaluate import evaluate as evaluate
