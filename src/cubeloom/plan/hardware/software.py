"""What computes and communicates on a cluster: which kernels there are, and what runs behind what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Attention = Literal["unfused", "flash", "flash2", "best"]


@dataclass(frozen=True, kw_only=True)
class Software:
    """The defaults are Cubeloom's own, compiled; the others are what was usual in a year, and describe measured runs."""

    name: str = "cubeloom"
    attention: Attention = "best"
    """Unfused: scores are written to memory. The first and second flash attention, or the fastest that the device has."""
    traffic: float = 1.0
    """Bytes that operators between products move, over those of one that reads its inputs and writes its output once."""
    composed_norms: bool = False
    """RMSNorm is a chain of operators in float32, as PyTorch composes it; LayerNorm is one operator everywhere."""
    dropout: bool = False
    operators: float = 1.0
    """That the host issues, over those of Cubeloom."""
    products: Literal["bf16", "fp8"] = "bf16"
    """In which the blocks' linears are computed, where numbers have two bytes."""
    hides_input_gradient: bool = True
    """The collective of an input gradient runs behind the weight gradient."""
    blocking: bool = False
    """Each collective is waited for where it starts."""
    hides_tensor: float = 0.0
    """The share of the collectives of activations that is split in pieces, which run behind the pieces of products."""
    recomputes_last: bool = False
    """A block that is computed again is so to its end, although no backward needs what its last product gives."""
    hands_shards: bool = False
    """Ranks that hold the same output of a stage send a share each to the next, where it is gathered."""
    hides_reduction: bool = True
    """Gradients are summed behind the last backward."""
    hides_gather: bool = False
    """Weights that replicas updated a share of each are gathered behind the first forward."""
    accumulates: float = 0.0
    """Bytes that each micro-batch moves to add a weight's gradient to earlier ones in the same precision; 0: a product does."""
    zero: bool = True
    """Replicas update a share of the weights each."""
    zero_ranks: int = 0
    """Among which an update is divided, where gradients are summed over more; 0: all replicas."""
    owns_tensors: bool = False
    """Each of those ranks updates whole tensors: one message for each of them sums its gradients, one hands its weights on."""
    bucket: float = 0.0
    """Bytes of gradients in a message; 0: so many that latency does not count."""
    update_bytes: float = 28.0
    """That an optimizer's step reads and writes for each parameter, in half precision."""
    fp32_master_weights: bool = True
    """Weights in half precision have float32 copies, which the optimizer updates."""
    moments: float | None = None
    """Bytes of each of AdamW's two moments of a parameter; by default those of the weights that it updates."""
    offload: bool = False
    """The optimizer's state is in the host's memory; at most two parameters' is on the device."""
    step: float = 0.0
    """Seconds of a step in which nothing is computed: data, clipping, logs, waiting for the host."""

    def state_bytes(self, item: int) -> float:
        """Of a parameter of `item` bytes: two moments, and in half precision a float32 weight."""
        master = 4 if self.fp32_master_weights and item < 4 else 0
        return master + 2 * (self.moments or master or item)


OWN = Software()
