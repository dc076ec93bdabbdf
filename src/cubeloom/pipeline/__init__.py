"""Pipelines: schedules as values, their generators, checker and simulator. No torch here.

Called, it is `cubeloom.pipeline`: see `cubeloom.pipeline.pipelined.pipeline`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cubeloom.pipeline.action import Action as Action
from cubeloom.pipeline.action import Kind as Kind
from cubeloom.pipeline.checker import check as check
from cubeloom.pipeline.checker import problems as problems
from cubeloom.pipeline.costs import Costs as Costs
from cubeloom.pipeline.files import from_csv as from_csv
from cubeloom.pipeline.files import from_json as from_json
from cubeloom.pipeline.files import to_csv as to_csv
from cubeloom.pipeline.files import to_json as to_json
from cubeloom.pipeline.messages import programme as programme
from cubeloom.pipeline.schedule import Schedule as Schedule
from cubeloom.pipeline.schedule import Updates as Updates
from cubeloom.pipeline.schedule import forwards as forwards
from cubeloom.pipeline.schedules import family as family
from cubeloom.pipeline.schedules import generate as generate
from cubeloom.pipeline.schedules import names as names
from cubeloom.pipeline.simulator import Timeline as Timeline
from cubeloom.pipeline.simulator import simulate as simulate
from cubeloom.pipeline.sync import Sync as Sync
from cubeloom.pipeline.sync import synchronised as synchronised

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from cubeloom.comm import Network
    from cubeloom.pipeline.pipelined import Pipelined


class _Callable(ModuleType):
    """`cubeloom.pipeline(model, mesh)` is a function to users, and a package to who asks it for schedules."""

    def __call__(self, model: Module, mesh: Network | DeviceMesh, *arguments: Any, **options: Any) -> Pipelined:
        from cubeloom.pipeline.pipelined import pipeline

        return pipeline(model, mesh, *arguments, **options)


sys.modules[__name__].__class__ = _Callable
