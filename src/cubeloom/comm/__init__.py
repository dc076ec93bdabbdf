"""The only package that uses torch.distributed: collectives, their handles, the ledger, devices.

Each name is imported when it is first used: `comm.kinds` needs no torch.
"""

from typing import TYPE_CHECKING

from cubeloom.base.lazy import lazily

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh as DeviceMesh

    from cubeloom.comm.axis import Axis as Axis
    from cubeloom.comm.axis import Pending as Pending
    from cubeloom.comm.comm_trace import CommTrace as CommTrace
    from cubeloom.comm.comm_trace import SimulatedLink as SimulatedLink
    from cubeloom.comm.failure import CommunicationError as CommunicationError
    from cubeloom.comm.failure import blames_others as blames_others
    from cubeloom.comm.host_group import HostGroup as HostGroup
    from cubeloom.comm.ledger import Entry as Entry
    from cubeloom.comm.ledger import Ledger as Ledger
    from cubeloom.comm.network import Network as Network
    from cubeloom.comm.watch import Watch as Watch

__getattr__, __dir__ = lazily(__name__, __file__)
