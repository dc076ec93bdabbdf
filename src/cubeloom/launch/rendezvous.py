"""The rendezvous of torch's elastic agent with itself and its ranks, if all are on this machine."""

from __future__ import annotations

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from cubeloom.comm import world

BACKEND = "cubeloom"


class OneMachine(RendezvousHandler):
    """There is one agent, which waits for no other.

    torch's own rendezvous listens on every interface and unpickles what it receives: anyone who reached it could run
    commands.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._store = world.host()
        self._round = 0

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Ranks use the same store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1  # after a restart, what the agent left in the store is outdated
        here = RendezvousStoreInfo(world.LOCAL, self._store.port)
        return RendezvousInfo(world.within(self._store, f"{self._run}.{self._round}"), 0, 1, here)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody else could join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run

    def shutdown(self) -> bool:
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return OneMachine(parameters.run_id)


rendezvous_handler_registry.register(BACKEND, _create)
