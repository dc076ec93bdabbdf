"""The models, as plain PyTorch that does not know about devices.

Each name is imported when it is first used: configurations and presets need no torch.
"""

from typing import TYPE_CHECKING

from cubeloom.base.lazy import lazily

if TYPE_CHECKING:
    from cubeloom.models.bert import BERT as BERT
    from cubeloom.models.bert import FirstToken as FirstToken
    from cubeloom.models.configs import BERTConfig as BERTConfig
    from cubeloom.models.configs import Config as Config
    from cubeloom.models.configs import GPTConfig as GPTConfig
    from cubeloom.models.configs import LanguageConfig as LanguageConfig
    from cubeloom.models.configs import LlamaConfig as LlamaConfig
    from cubeloom.models.configs import ResNetConfig as ResNetConfig
    from cubeloom.models.configs import UNetConfig as UNetConfig
    from cubeloom.models.cuts import cut_of as cut_of
    from cubeloom.models.gpt import GPT as GPT
    from cubeloom.models.hugging_face import config_from_diffusers as config_from_diffusers
    from cubeloom.models.hugging_face import config_from_hugging_face as config_from_hugging_face
    from cubeloom.models.hugging_face import from_hugging_face as from_hugging_face
    from cubeloom.models.hugging_face import to_hugging_face as to_hugging_face
    from cubeloom.models.layers import AttentionByHead as AttentionByHead
    from cubeloom.models.layers import AttentionCore as AttentionCore
    from cubeloom.models.layers import CrossEntropy as CrossEntropy
    from cubeloom.models.layers import MeanSquaredError as MeanSquaredError
    from cubeloom.models.layers import SwiGLU as SwiGLU
    from cubeloom.models.llama import Llama as Llama
    from cubeloom.models.modules import LanguageModel as LanguageModel
    from cubeloom.models.modules import Model as Model
    from cubeloom.models.modules import build as build
    from cubeloom.models.our_model import OurModel as OurModel
    from cubeloom.models.our_model import preset as preset
    from cubeloom.models.presets import PRESETS as PRESETS
    from cubeloom.models.presets import config as config
    from cubeloom.models.presets import names as names
    from cubeloom.models.resnet import ResNet as ResNet
    from cubeloom.models.source import ModelSource as ModelSource
    from cubeloom.models.source import sharding_policy as sharding_policy
    from cubeloom.models.source import skeleton as skeleton
    from cubeloom.models.unet import Concat as Concat
    from cubeloom.models.unet import UNet as UNet
    from cubeloom.models.unet import noise_added as noise_added

__getattr__, __dir__ = lazily(__name__, __file__)
