"""Training: optimizers, gradient norms, checkpoints, and the loop that combines them.

Each name is imported when it is first used: settings need no torch.
"""

from typing import TYPE_CHECKING

from cubeloom.base.lazy import lazily

if TYPE_CHECKING:
    from cubeloom.train.block_optimizer import BlockOptimizer as BlockOptimizer
    from cubeloom.train.sharded_optimizer import ShardedOptimizer as ShardedOptimizer

__getattr__, __dir__ = lazily(__name__, __file__)
