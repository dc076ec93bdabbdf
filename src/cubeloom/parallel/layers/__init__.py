"""The layers of the cube, one file per kind: its declaration in a cut, and the module that computes it on a rank."""

from cubeloom.parallel.layers.attention import Attention as Attention
from cubeloom.parallel.layers.declared import AnyCut as AnyCut
from cubeloom.parallel.layers.declared import Cut as Cut
from cubeloom.parallel.layers.declared import Declared as Declared
from cubeloom.parallel.layers.declared import Making as Making
from cubeloom.parallel.layers.declared import Seen as Seen
from cubeloom.parallel.layers.declared import make_layer as make_layer
from cubeloom.parallel.layers.dropout import Dropout as Dropout
from cubeloom.parallel.layers.edges import ColwiseFromReplicated as ColwiseFromReplicated
from cubeloom.parallel.layers.edges import Concat as Concat
from cubeloom.parallel.layers.edges import CopyToRegion as CopyToRegion
from cubeloom.parallel.layers.edges import FeedForward as FeedForward
from cubeloom.parallel.layers.edges import Grouped as Grouped
from cubeloom.parallel.layers.edges import Replicated as Replicated
from cubeloom.parallel.layers.edges import RowwiseScatter as RowwiseScatter
from cubeloom.parallel.layers.edges import RowwiseToReplicated as RowwiseToReplicated
from cubeloom.parallel.layers.edges import SquaredLoss as SquaredLoss
from cubeloom.parallel.layers.embedding import Embedding as Embedding
from cubeloom.parallel.layers.embedding import Table as Table
from cubeloom.parallel.layers.first_token import FirstToken as FirstToken
from cubeloom.parallel.layers.image_norms import CubeBatchNorm as CubeBatchNorm
from cubeloom.parallel.layers.linear import Contract as Contract
from cubeloom.parallel.layers.linear import Expand as Expand
from cubeloom.parallel.layers.loss import Loss as Loss
from cubeloom.parallel.layers.norm import Norm as Norm
from cubeloom.parallel.layers.traced import TracedLinear as TracedLinear
