"""Models as lists of layers, taken from the real modules."""

from cubeloom.plan.model.model import Model as Model
from cubeloom.plan.model.model import Piece as Piece
from cubeloom.plan.model.model import refusals as refusals
from cubeloom.plan.model.store import load as load
from cubeloom.plan.model.store import names as names
from cubeloom.plan.model.store import with_stages as with_stages
