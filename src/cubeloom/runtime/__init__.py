"""Train a model whose stages lie on several workers, as any checked schedule says."""

from cubeloom.runtime.interpreter import PipelineError as PipelineError
from cubeloom.runtime.pipeline import Pipeline as Pipeline
