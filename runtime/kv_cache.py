"""How the KV cache grows: in steps as sequences get longer, never the whole context up front."""

FIRST_STEP = 256
LARGE_STEP = 1024


def next_capacity(needed: int, maximum: int) -> int:
    """Positions to reserve for ``needed`` ones: multiples of 256, above 1,024 of 1,024, at most ``maximum``.

    Every growth copies the cache once; with these steps that stays far below the cost of the tokens in between.
    """
    step = FIRST_STEP if needed <= LARGE_STEP else LARGE_STEP
    return min(maximum, -(-needed // step) * step)
