"""What the cube is compared with: SUMMA, the schemes of other libraries, and a lower bound for any algorithm."""

from cubeloom.tools.baselines.bound import best_grid as best_grid
from cubeloom.tools.baselines.bound import lower_bound as lower_bound
from cubeloom.tools.baselines.bound import matmul_grids as matmul_grids
from cubeloom.tools.baselines.bound import moved_words as moved_words
from cubeloom.tools.baselines.bound import regime as regime
from cubeloom.tools.baselines.schemes import Scheme as Scheme
from cubeloom.tools.baselines.schemes import Shape as Shape
from cubeloom.tools.baselines.schemes import schemes as schemes
from cubeloom.tools.baselines.summa import SummaLinear as SummaLinear
from cubeloom.tools.baselines.summa import nearest_planes as nearest_planes
from cubeloom.tools.baselines.summa import summa_words as summa_words
