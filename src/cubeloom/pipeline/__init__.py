"""Pipelines: schedules as values, their generators, checker and simulator. This part does not use torch.

The package can be called: `cubeloom.pipeline(model, mesh)` is `cubeloom.pipeline.pipelined.pipeline`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

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
from cubeloom.pipeline.sync import overlapped as overlapped
from cubeloom.pipeline.sync import synchronised as synchronised


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return import_module("cubeloom.pipeline.pipelined").pipeline(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
