"""What `AdaptiveBatchSize` says when a batch cannot be trained on this device."""

import re
from collections.abc import Mapping
from typing import Any, Final

from lit_data.callbacks.adaptive.hand import Hand
from lit_data.callbacks.adaptive.pieces import describe_shapes
from lit_data.callbacks.device_memory import MemoryReading

_ASKED: Final = re.compile(r"(?:tried to allocate|allocate) ([\d.]+ ?(?:[KMGT]i?B|bytes))", re.IGNORECASE)


def describe_no_room(hand: Hand, size: int, text: str, reading: MemoryReading) -> str:
    """The smallest piece does not fit.

    Args:
        hand: The batch.
        size: Samples of the piece.
        text: Of the error.
        reading: Memory after the failed attempt was released.
    """
    found = _ASKED.search(text)
    free = max(0, reading.limit_bytes - reading.allocated_bytes)
    indices: Any = hand.host.get("index") if isinstance(hand.host, Mapping) else None
    named = f" (sample {int(indices[0])})" if indices is not None and len(indices) else ""
    many = "one sample" if size == 1 else f"the smallest piece of {size} samples"
    return (
        f"batch {hand.index}{named}: {many} of {describe_shapes(hand.host, hand.samples)} does not fit into memory: "
        f"asked for {found.group(1) if found else 'an unknown amount'}, {free / 2**30:.2f} of "
        f"{reading.limit_bytes / 2**30:.2f} GiB free ({text}). Use a smaller patch or model, mixed precision (AMP), "
        "GradientCheckpointing, or free the device of other programs"
    )


def describe_batch_norm(hand: Hand) -> str:
    """Single samples would fit, but batch norm has nothing to normalise in them."""
    return (
        f"batch {hand.index}: {hand.search.fails} samples at once do not fit into memory, and batch norm cannot train "
        "on one: use a smaller patch or model, mixed precision (AMP), GradientCheckpointing, or a norm that does not "
        "depend on the batch (GroupNorm)"
    )
