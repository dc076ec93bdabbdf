"""3-D tensor parallelism from one matmul: cuts, and the layers that they make of a plain model."""

from cubeloom.cube.apply import apply as apply
from cubeloom.cube.apply import initial_values as initial_values
from cubeloom.cube.apply import materialise as materialise
from cubeloom.cube.cut import Contract as Contract
from cubeloom.cube.cut import Cut as Cut
from cubeloom.cube.cut import CutError as CutError
from cubeloom.cube.cut import Dropout as Dropout
from cubeloom.cube.cut import Embedding as Embedding
from cubeloom.cube.cut import Expand as Expand
from cubeloom.cube.cut import FirstToken as FirstToken
from cubeloom.cube.cut import Loss as Loss
from cubeloom.cube.cut import Norm as Norm
from cubeloom.cube.cut import Rest as Rest
from cubeloom.cube.cut import Table as Table
from cubeloom.cube.cut import Whole as Whole
from cubeloom.cube.forms import Batch as Batch
from cubeloom.cube.resolve import resolve as resolve
from cubeloom.cube.state import CubeState as CubeState
from cubeloom.cube.volume import step_volume as step_volume
