"""Training: optimizers so far."""

from cubeloom.train.block_optimizer import BlockOptimizer as BlockOptimizer
from cubeloom.train.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
