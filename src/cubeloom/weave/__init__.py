"""The weave: a micro-batch as several strands, of which one computes while another waits for a collective."""

from cubeloom.weave.loom import Weave as Weave
from cubeloom.weave.loom import meet as meet
from cubeloom.weave.loom import pause as pause
from cubeloom.weave.loom import place as place
from cubeloom.weave.loom import refuse_to_guess as refuse_to_guess
from cubeloom.weave.loom import replaying as replaying
from cubeloom.weave.loom import strand as strand
from cubeloom.weave.recompute import recompute as recompute
