"""Adapters in a call of the session."""

from collections.abc import Sequence
from dataclasses import replace

from llmc.runtime.kv.rows import Slot
from llmc.runtime.sessions import Batch


def add_factors(call: Batch, slots: Sequence[Slot]) -> Batch:
    """The call with the adapters of its first rows, if one has an adapter; rows behind these have none."""
    adapters = [slot.adapter for slot in slots]
    if not any(adapters):
        return call
    return replace(call, adapters=(*adapters, *[None] * (len(call.input_ids) - len(adapters))))
