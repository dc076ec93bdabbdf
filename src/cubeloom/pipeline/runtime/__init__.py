"""Trains a model whose stages are on several workers, following any checked schedule."""

from cubeloom.pipeline.runtime.interpreter import PipelineError as PipelineError
from cubeloom.pipeline.runtime.pipeline import Pipeline as Pipeline
