"""Training: optimizers, the norm of gradients, learning rates."""

from cubeloom.train.block_optimizer import BlockOptimizer as BlockOptimizer
from cubeloom.train.rates import Rate as Rate
from cubeloom.train.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
