"""Converts Hugging Face folders to checkpoints and back, one tensor at a time: no process holds the whole model."""

from cubeloom.tools.convert.conversion import SHARD_SIZE as SHARD_SIZE
from cubeloom.tools.convert.conversion import Done as Done
from cubeloom.tools.convert.conversion import convert as convert
