"""How the suite is spread over its workers: what takes longest begins first, so that none waits long for another's last file.

The tests of a file stay together, since they share fixtures; so do those of a page, which use what a command before wrote.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import pytest
from xdist.scheduler import LoadScopeScheduling

# A test of a page has the page's name first among its parameters.
_OF_A_PAGE = re.compile(r"\[([\w-]+\.md)\b")


def together(nodeid: str) -> str:
    """What is the same for tests that one worker runs."""
    page = _OF_A_PAGE.search(nodeid)
    return nodeid.partition("::")[0] + (f" {page[1]}" if page else "")


class Balanced(LoadScopeScheduling):
    """Gives whoever is about to have nothing left the next file, or page, in the order of collection."""

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return together(nodeid)


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Files with a slow test, then those with the most that start ranks; what is left fills the gaps at the end."""
    slow = Counter(together(item.nodeid) for item in items if item.get_closest_marker("slow"))
    ranks = Counter(together(item.nodeid) for item in items if "ranks" in getattr(item, "fixturenames", ()))

    def key(item: pytest.Item) -> tuple[bool, int]:
        where = together(item.nodeid)
        return not slow[where], -ranks[where]

    return sorted(items, key=key)


def quick(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Every test that is not slow, with the first of its parameters alone."""
    found: dict[str, pytest.Item] = {}
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("slow", "long", "gpu")):
            found.setdefault(item.nodeid.partition("[")[0], item)
    return list(found.values())
