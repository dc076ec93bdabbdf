"""What the cube is measured against: SUMMA, the schemes that others use, and what no algorithm can do better."""

from cubeloom.baselines.bound import best_grid as best_grid
from cubeloom.baselines.bound import lower_bound as lower_bound
from cubeloom.baselines.bound import matmul_grids as matmul_grids
from cubeloom.baselines.bound import moved_words as moved_words
from cubeloom.baselines.bound import regime as regime
from cubeloom.baselines.schemes import Scheme as Scheme
from cubeloom.baselines.schemes import Shape as Shape
from cubeloom.baselines.schemes import schemes as schemes
from cubeloom.baselines.summa import SummaLinear as SummaLinear
from cubeloom.baselines.summa import nearest_planes as nearest_planes
from cubeloom.baselines.summa import summa_words as summa_words
