"""The weave: splits a micro-batch into strands, so that one computes while another waits for a collective."""

from cubeloom.parallel.weave.loom import Weave as Weave
from cubeloom.parallel.weave.loom import keep as keep
from cubeloom.parallel.weave.loom import kept as kept
from cubeloom.parallel.weave.loom import meet as meet
from cubeloom.parallel.weave.loom import pause as pause
from cubeloom.parallel.weave.loom import place as place
from cubeloom.parallel.weave.loom import refuse_to_guess as refuse_to_guess
from cubeloom.parallel.weave.loom import replaying as replaying
from cubeloom.parallel.weave.loom import run_in_strands as run_in_strands
from cubeloom.parallel.weave.loom import split as split
from cubeloom.parallel.weave.loom import strand as strand
from cubeloom.parallel.weave.recompute import recompute as recompute
