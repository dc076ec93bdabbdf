"""Data: text to token files, and token files to batches whose order depends on the seed and the position alone."""

from cubeloom.data.loader import Loader as Loader
from cubeloom.data.mixture import Mixture as Mixture
from cubeloom.data.permutation import Permutation as Permutation
from cubeloom.data.prepare import Prepared as Prepared
from cubeloom.data.prepare import prepare as prepare
from cubeloom.data.request import Request as Request
from cubeloom.data.stream import Samples as Samples
from cubeloom.data.stream import Stream as Stream
from cubeloom.data.token_file import TokenFile as TokenFile
from cubeloom.data.tokenizer import Bytes as Bytes
from cubeloom.data.tokenizer import Tokenizer as Tokenizer
