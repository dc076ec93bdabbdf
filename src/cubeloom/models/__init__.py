"""The models, as plain PyTorch that knows nothing of devices."""

from cubeloom.models.bert import BERT as BERT
from cubeloom.models.bert import BERTConfig as BERTConfig
from cubeloom.models.bert import FirstToken as FirstToken
from cubeloom.models.cuts import cut_of as cut_of
from cubeloom.models.gpt import GPT as GPT
from cubeloom.models.gpt import GPTConfig as GPTConfig
from cubeloom.models.hugging_face import config_from_hugging_face as config_from_hugging_face
from cubeloom.models.hugging_face import from_hugging_face as from_hugging_face
from cubeloom.models.hugging_face import to_hugging_face as to_hugging_face
from cubeloom.models.layers import AttentionCore as AttentionCore
from cubeloom.models.layers import CrossEntropy as CrossEntropy
from cubeloom.models.layers import SwiGLU as SwiGLU
from cubeloom.models.llama import Llama as Llama
from cubeloom.models.llama import LlamaConfig as LlamaConfig
from cubeloom.models.presets import PRESETS as PRESETS
from cubeloom.models.presets import Config as Config
from cubeloom.models.presets import Model as Model
from cubeloom.models.presets import build as build
from cubeloom.models.presets import config as config
from cubeloom.models.presets import names as names
