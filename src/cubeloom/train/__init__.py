"""Training: optimizers, the norm of gradients, checkpoints, and the loop that puts them together."""

from cubeloom.train.block_optimizer import BlockOptimizer as BlockOptimizer
from cubeloom.train.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
