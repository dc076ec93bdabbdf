"""Data: from text to token files, and from token files to batches whose order depends only on seed and position."""

from typing import TYPE_CHECKING

from cubeloom.base.lazy import lazily

if TYPE_CHECKING:
    from cubeloom.train.data.documents import Records as Records
    from cubeloom.train.data.documents import Streamed as Streamed
    from cubeloom.train.data.loader import Loader as Loader
    from cubeloom.train.data.mixture import Mixture as Mixture
    from cubeloom.train.data.permutation import Permutation as Permutation
    from cubeloom.train.data.preparing import Prepared as Prepared
    from cubeloom.train.data.preparing import prepare as prepare
    from cubeloom.train.data.request import Request as Request
    from cubeloom.train.data.stream import Samples as Samples
    from cubeloom.train.data.stream import Stream as Stream
    from cubeloom.train.data.streaming import Streaming as Streaming
    from cubeloom.train.data.token_file import TokenFile as TokenFile
    from cubeloom.train.data.tokenizer import Bytes as Bytes
    from cubeloom.train.data.tokenizer import Tokenizer as Tokenizer

__getattr__, __dir__ = lazily(__name__, __file__)
