"""`cubeloom.init`: makes this process a rank of a grid, however it was started."""

from __future__ import annotations

import atexit
import difflib
from typing import Any, cast

from cubeloom.base.errors import UserError, counted
from cubeloom.base.grid import AXES, Grid
from cubeloom.comm import Network, devices, world
from cubeloom.comm.mesh import default_device, joined
from cubeloom.launch.environment import current, membership
from cubeloom.launch.ready import join


def init(*, device: devices.Kind | None = None, timeout: float = 600, **sizes: int) -> Network:
    """Join the ranks of this job into a grid: `init(data=2, z=2, y=2)`. Axes that are not named have size 1.

    Works under torchrun, mpirun, srun and `cubeloom.launch.run`, and in a single process for a grid of one rank.
    `timeout`: seconds that a rank waits for another before the job ends.
    """
    for name in sizes:
        if name not in AXES:
            near = difflib.get_close_matches(name, AXES, 1, cutoff=0.0)[0]
            raise UserError(f"init has no axis {name!r}; did you mean {near!r}? The axes are {', '.join(AXES)}")
    grid = Grid(**cast("dict[str, Any]", sizes))
    kind = device or default_device()
    if not devices.available(kind):
        raise UserError(f"device={kind!r}: torch sees none here; use device={devices.CPU!r}")
    if not joined():
        _join(grid, kind, timeout)
    return Network(grid, devices.current(kind), timeout)


def _join(grid: Grid, kind: devices.Kind, timeout: float) -> None:
    here = membership(current())
    if here is not None:
        join(here, kind, timeout)
    elif grid.world == 1:
        devices.use(kind, 0)
        world.join(world.host(), "alone", 0, 1, kind, timeout)
    else:
        raise UserError(
            f"the grid {grid} needs {counted(grid.world, 'rank')}, and this is a single process: start it with"
            f" `torchrun --nproc-per-node {grid.world} FILE`, or call a function with"
            f" cubeloom.launch.run({grid.world}, function)"
        )
    atexit.register(world.leave_if_joined)
