"""3-D tensor parallelism from one matmul: cuts, and the sharded layers that they create from a plain model.

Names that need torch are imported when they are first used: the planner reads the specs of layers without torch.
"""

from typing import TYPE_CHECKING

from cubeloom.base.lazy import lazily
from cubeloom.parallel.config import Batch as Batch
from cubeloom.parallel.config import ParallelConfig as ParallelConfig
from cubeloom.parallel.config import ShardingPolicy as ShardingPolicy
from cubeloom.parallel.cut import CutError as CutError
from cubeloom.parallel.volume import step_volume as step_volume

if TYPE_CHECKING:
    from cubeloom.parallel.check import Example as Example
    from cubeloom.parallel.check import Given as Given
    from cubeloom.parallel.layers import AnyCut as AnyCut
    from cubeloom.parallel.layers import Attention as Attention
    from cubeloom.parallel.layers import ColwiseFromReplicated as ColwiseFromReplicated
    from cubeloom.parallel.layers import Concat as Concat
    from cubeloom.parallel.layers import Contract as Contract
    from cubeloom.parallel.layers import CopyToRegion as CopyToRegion
    from cubeloom.parallel.layers import Cut as Cut
    from cubeloom.parallel.layers import Dropout as Dropout
    from cubeloom.parallel.layers import Embedding as Embedding
    from cubeloom.parallel.layers import Expand as Expand
    from cubeloom.parallel.layers import FeedForward as FeedForward
    from cubeloom.parallel.layers import FirstToken as FirstToken
    from cubeloom.parallel.layers import Grouped as Grouped
    from cubeloom.parallel.layers import Loss as Loss
    from cubeloom.parallel.layers import Norm as Norm
    from cubeloom.parallel.layers import Replicated as Replicated
    from cubeloom.parallel.layers import RowwiseScatter as RowwiseScatter
    from cubeloom.parallel.layers import RowwiseToReplicated as RowwiseToReplicated
    from cubeloom.parallel.layers import SquaredLoss as SquaredLoss
    from cubeloom.parallel.layers import Table as Table
    from cubeloom.parallel.replace import apply as apply
    from cubeloom.parallel.replace import initial_values as initial_values
    from cubeloom.parallel.replace import materialise as materialise
    from cubeloom.parallel.resolution import resolve as resolve
    from cubeloom.parallel.state import CubeState as CubeState

__getattr__, __dir__ = lazily(__name__, __file__)
