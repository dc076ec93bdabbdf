"""Train a model whose stages lie on several workers, as any checked schedule says."""

from cubeloom.pipeline.runtime.interpreter import PipelineError as PipelineError
from cubeloom.pipeline.runtime.pipeline import Pipeline as Pipeline
