"""Cubeloom: train neural networks that are too large for one device.

    mesh = cubeloom.init(data=2, z=2, y=2)
    cubeloom.parallelize(model, mesh)

What is named here is the public face; everything else may change. Each is imported when it is first asked for: schedules,
drawings and plans need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cubeloom.base.errors import UserError as UserError
from cubeloom.base.grid import Grid as Grid

if TYPE_CHECKING:
    from cubeloom.comm import Network as Network
    from cubeloom.launch.init import init as init
    from cubeloom.models.parallelize import parallelize as parallelize
    from cubeloom.parallel.traced import Traced as Traced
    from cubeloom.pipeline.pipelined import Pipelined as Pipelined
    from cubeloom.pipeline.pipelined import pipeline as pipeline
    from cubeloom.tools.convert.model_files import load as load
    from cubeloom.tools.convert.model_files import save as save
    from cubeloom.tools.convert.model_files import save_pretrained as save_pretrained
    from cubeloom.train.clipping import clip_grad_norm_ as clip_grad_norm_
    from cubeloom.train.library import Trainer as Trainer

__version__ = "0.1.0"

_WHERE = {
    "Network": "comm",
    "init": "launch.init",
    "parallelize": "models.parallelize",
    "Traced": "parallel.traced",
    "Pipelined": "pipeline.pipelined",
    "clip_grad_norm_": "train.clipping",
    "Trainer": "train.library",
    "load": "tools.convert.model_files",
    "save": "tools.convert.model_files",
    "save_pretrained": "tools.convert.model_files",
}


def __getattr__(name: str) -> Any:
    if name == "pipeline":  # a package that can be called
        return import_module("cubeloom.pipeline")
    if name not in _WHERE:
        raise AttributeError(f"module 'cubeloom' has no attribute {name!r}")
    return getattr(import_module(f"cubeloom.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, "pipeline"})
