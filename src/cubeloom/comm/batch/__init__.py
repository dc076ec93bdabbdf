"""Tensors of the whole batch, of which each rank has its samples."""

from cubeloom.comm.batch.parts import Parts as Parts
from cubeloom.comm.batch.sums import Average as Average
from cubeloom.comm.batch.sums import Mean as Mean
from cubeloom.comm.batch.sums import Sum as Sum
from cubeloom.comm.batch.tensor import BatchTensor as BatchTensor
from cubeloom.comm.batch.tensor import batch_tensor as batch_tensor
from cubeloom.comm.batch.tensor import gathered as gathered
from cubeloom.comm.batch.tensor import part_of as part_of
from cubeloom.comm.batch.value import BatchValue as BatchValue
