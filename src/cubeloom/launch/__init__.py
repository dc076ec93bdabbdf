"""Ranks: on this machine, on shared GPUs, in the jobs of torchrun, mpirun, Slurm and Kubernetes."""

from cubeloom.launch.pool import RankFailed as RankFailed
from cubeloom.launch.pool import RankPool as RankPool
from cubeloom.launch.pool import run as run
