"""A check that the largest logits are enough to choose a token as all of them would."""

import numpy as np

from llmc.runtime.sampling.masses import Logits


def suffice(logits: Logits, needs: int) -> bool:
    """True if ``logits`` [V], with -inf wherever a session left one out, hold the ``needs`` largest and all their
    equals.

    What was left out is no larger than the least of those that are there. So it is enough that the last of the needed
    ones is larger than that; where both are equal, one more of the same size may have been left out. NaN is never
    enough, so that whoever sees all logits says what they hold.
    """
    if logits.min() > -np.inf:  # nothing was left out
        return True
    there = logits.take(np.flatnonzero(logits != -np.inf))
    if there.size <= needs:
        return False
    last = np.partition(there, there.size - needs)[there.size - needs]
    return bool(last > there.min())
