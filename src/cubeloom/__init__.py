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
from cubeloom.base.lazy import lazily

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

_lazy, __dir__ = lazily(__name__, __file__)


def __getattr__(name: str) -> Any:
    # A package that can be called; its module `pipelined` is not imported for `cubeloom.pipeline.Schedule`.
    return import_module("cubeloom.pipeline") if name == "pipeline" else _lazy(name)
