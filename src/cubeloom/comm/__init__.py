"""The only door to torch.distributed: collectives, their handles, the ledger, devices."""

from cubeloom.comm.aside import Aside as Aside
from cubeloom.comm.axis import Axis as Axis
from cubeloom.comm.axis import Pending as Pending
from cubeloom.comm.failure import CommunicationError as CommunicationError
from cubeloom.comm.failure import blames_others as blames_others
from cubeloom.comm.journal import Journal as Journal
from cubeloom.comm.journal import Wire as Wire
from cubeloom.comm.ledger import Entry as Entry
from cubeloom.comm.ledger import Ledger as Ledger
from cubeloom.comm.network import Network as Network
from cubeloom.comm.watch import Watch as Watch
