"""Models as lists of layers, taken from the real modules."""

from cubeloom.plan.model.layers import Model as Model
from cubeloom.plan.model.layers import Piece as Piece
from cubeloom.plan.model.store import load as load
from cubeloom.plan.model.store import names as names
from cubeloom.plan.model.store import with_stages as with_stages
