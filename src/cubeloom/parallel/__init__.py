"""3-D tensor parallelism from one matmul: cuts, and the layers that they make of a plain model."""

from cubeloom.parallel.apply import apply as apply
from cubeloom.parallel.apply import initial_values as initial_values
from cubeloom.parallel.apply import materialise as materialise
from cubeloom.parallel.check import Example as Example
from cubeloom.parallel.check import Given as Given
from cubeloom.parallel.cut import Contract as Contract
from cubeloom.parallel.cut import Cut as Cut
from cubeloom.parallel.cut import CutError as CutError
from cubeloom.parallel.cut import Dropout as Dropout
from cubeloom.parallel.cut import Embedding as Embedding
from cubeloom.parallel.cut import Expand as Expand
from cubeloom.parallel.cut import FirstToken as FirstToken
from cubeloom.parallel.cut import Loss as Loss
from cubeloom.parallel.cut import Norm as Norm
from cubeloom.parallel.cut import Rest as Rest
from cubeloom.parallel.cut import Table as Table
from cubeloom.parallel.cut import Whole as Whole
from cubeloom.parallel.forms import Batch as Batch
from cubeloom.parallel.resolve import resolve as resolve
from cubeloom.parallel.state import CubeState as CubeState
from cubeloom.parallel.volume import step_volume as step_volume
