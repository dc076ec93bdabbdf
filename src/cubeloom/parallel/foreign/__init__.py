"""Models that others wrote, cut over the cube as they come: `cut` proposes, `Proposal.apply` replaces the layers."""

from cubeloom.parallel.foreign.loss import mean_over_batch as mean_over_batch
from cubeloom.parallel.foreign.proposal import Proposal as Proposal
from cubeloom.parallel.foreign.propose import cut as cut
