"""Start ranks on this machine."""

from cubeloom.launch.pool import RankFailed as RankFailed
from cubeloom.launch.pool import RankPool as RankPool
from cubeloom.launch.pool import run as run
