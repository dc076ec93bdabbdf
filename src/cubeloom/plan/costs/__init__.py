"""What computing and communicating cost on a device or cluster, in seconds.

Every function takes plain numbers or numpy arrays, which broadcast against each other, so that a whole search is one call.

Computing (`compute`):
    matmul(device, m, n, k, dtype="bf16", count=1)                    `count` products [m,k] · [k,n] in one launch
    memory_bound(device, nbytes)                                      an operator that only reads and writes

Communicating (`collectives`): a group of `group` ranks, `rank_stride` apart, all such groups of the cluster at once.
    all_gather, reduce_scatter(cluster, nbytes, group, rank_stride=1, algorithm="ring")    `nbytes` of the whole tensor
    all_reduce(cluster, nbytes, group, rank_stride=1, algorithm="best")
    all_to_all(cluster, nbytes, group, rank_stride=1)                       `nbytes` of what one rank has before or after
    send(cluster, nbytes, group, rank_stride=1)                             to the next of the group, over its slowest hop
    ring_bandwidth(cluster, group, rank_stride=1)                           bytes a second of each ring (the rule of AxoNN)

Both at once (`overlap`):
    together(compute, communication, drag)                            the time of both
    exposed(compute, communication, drag)                             what communication adds to it
"""

from cubeloom.plan.costs.collectives import Algorithm as Algorithm
from cubeloom.plan.costs.collectives import all_gather as all_gather
from cubeloom.plan.costs.collectives import all_reduce as all_reduce
from cubeloom.plan.costs.collectives import all_to_all as all_to_all
from cubeloom.plan.costs.collectives import members as members
from cubeloom.plan.costs.collectives import reduce_scatter as reduce_scatter
from cubeloom.plan.costs.collectives import ring_bandwidth as ring_bandwidth
from cubeloom.plan.costs.collectives import send as send
from cubeloom.plan.costs.compute import fused_attention as fused_attention
from cubeloom.plan.costs.compute import matmul as matmul
from cubeloom.plan.costs.compute import memory_bound as memory_bound
from cubeloom.plan.costs.overlap import exposed as exposed
from cubeloom.plan.costs.overlap import together as together
from cubeloom.plan.costs.quantity import Quantity as Quantity
