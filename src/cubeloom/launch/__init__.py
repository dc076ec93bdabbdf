"""Starts ranks: on this machine, on shared GPUs, in jobs of torchrun, mpirun, Slurm, Kubernetes and Ray.

Each name is imported when it is first used: `launch.environment` needs no torch.
"""

from typing import TYPE_CHECKING

from cubeloom.base.lazy import lazily

if TYPE_CHECKING:
    from cubeloom.launch.pool import RankFailed as RankFailed
    from cubeloom.launch.pool import RankPool as RankPool
    from cubeloom.launch.pool import run as run

__getattr__, __dir__ = lazily(__name__, __file__)
