"""Checkpoints that any grid, schedule and number of ranks can resume: weights, optimizer, position in the training.

    folder/step-00000100/      one checkpoint: a safetensors file per rank; index.json, which says in which file each
                               block of each tensor is; and manifest.json with the checksums of all
    folder/.step-00000200/     one that is being written; a crash leaves it, and it is never read

A checkpoint is atomic: it is written in the same parent folder and renamed when all ranks are done. Its files contain
only numbers and JSON, so reading one executes nothing, whoever wrote it.
"""

from cubeloom.train.checkpoint.blocks import read_blocks as read_blocks
from cubeloom.train.checkpoint.entries import MASTER as MASTER
from cubeloom.train.checkpoint.entries import STATE as STATE
from cubeloom.train.checkpoint.entries import WEIGHTS as WEIGHTS
from cubeloom.train.checkpoint.index import Index as Index
from cubeloom.train.checkpoint.index import files_of as files_of
from cubeloom.train.checkpoint.index import index_of as index_of
from cubeloom.train.checkpoint.index import read_index as read_index
from cubeloom.train.checkpoint.load import OtherModel as OtherModel
from cubeloom.train.checkpoint.load import check_fits as check_fits
from cubeloom.train.checkpoint.load import load_checkpoint as load_checkpoint
from cubeloom.train.checkpoint.load import load_weights as load_weights
from cubeloom.train.checkpoint.manifest import BEST as BEST
from cubeloom.train.checkpoint.manifest import best as best
from cubeloom.train.checkpoint.manifest import check_files as check_files
from cubeloom.train.checkpoint.manifest import checkpoints as checkpoints
from cubeloom.train.checkpoint.manifest import newest as newest
from cubeloom.train.checkpoint.manifest import read_manifest as read_manifest
from cubeloom.train.checkpoint.manifest import seal as seal
from cubeloom.train.checkpoint.save import CheckpointWriter as CheckpointWriter
from cubeloom.train.checkpoint.save import save_checkpoint as save_checkpoint
