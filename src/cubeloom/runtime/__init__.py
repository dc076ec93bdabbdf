"""Train a model whose stages lie on several workers, as any checked schedule says."""

from cubeloom.runtime.pipeline import Pipeline as Pipeline
from cubeloom.runtime.pipeline import PipelineError as PipelineError
