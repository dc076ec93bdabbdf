"""Training: optimizers so far."""

from cubeloom.train.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
