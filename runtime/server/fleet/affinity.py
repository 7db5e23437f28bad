"""The replica that a request should go to: the one that computed most of its prompt, unless it has too much to do."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

# A replica may have so many times the mean of all (bounded loads: https://arxiv.org/abs/1608.01350).
IMBALANCE = 1.25
# Blocks that are remembered, some 200 bytes each.
MOST_REMEMBERED = 65_536
# Replicas that are remembered for a block: one that many prompts begin with comes to be everywhere.
MOST_HOLDERS = 8


class Affinity:
    """Remembers which replica got which blocks of prompts.

    What nobody has seen goes to a replica by rendezvous hashing of its first block
    (https://www.eecs.umich.edu/techreports/cse/96/CSE-TR-316-96.pdf): fronts that know nothing of each other agree, and
    when a replica comes or goes, only what belongs to that one moves.

    Args:
        rows: requests that a replica computes at once. A replica with fewer than that is never too busy: company in a
            batch costs a request less than a prompt that is computed again.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()  # least recently used first

    def order(self, prefix: Sequence[bytes], loads: Mapping[str, int]) -> list[str]:
        """All replicas, the best first.

        Args:
            prefix: names of the prompt's blocks; see :func:`llmc.runtime.server.fleet.prefixes.prefix_of`.
            loads: requests that each replica has now.
        """
        # Somebody is always within the bound: were all above it, so would their mean be.
        most = max(self._rows, IMBALANCE * (sum(loads.values()) + 1) / max(len(loads), 1))
        held = self._count_held(prefix)
        first = prefix[0] if prefix else None

        def rank(replica: str) -> tuple[bool, int, int, int]:
            busy = loads[replica] + 1 > most
            drawn = 0 if first is None else _draw(first, replica)
            # Those that are too busy stand last, the least busy of them first; so do those without a claim.
            weighs = busy or first is None
            return busy, loads[replica] if weighs else 0, -held.get(replica, 0), drawn

        return sorted(loads, key=rank)

    def note(self, prefix: Sequence[bytes], replica: str) -> None:
        """A replica got the request, and will have its blocks."""
        for block in prefix:
            others = (holder for holder in self._holders.pop(block, ()) if holder != replica)
            self._holders[block] = (replica, *others)[:MOST_HOLDERS]
        while len(self._holders) > MOST_REMEMBERED:
            self._holders.popitem(last=False)

    def _count_held(self, prefix: Sequence[bytes]) -> dict[str, int]:
        """Blocks from the beginning on that each replica has."""
        found: dict[str, int] = {}
        for length, block in enumerate(prefix):
            # One that lost a block in between has what comes after it only in our memory.
            here = [holder for holder in self._holders.get(block, ()) if found.get(holder, 0) == length]
            if not here:
                break
            found |= dict.fromkeys(here, length + 1)
        return found


def _draw(block: bytes, replica: str) -> int:
    return int.from_bytes(blake2b(replica.encode(), key=block, digest_size=8).digest(), "big")
