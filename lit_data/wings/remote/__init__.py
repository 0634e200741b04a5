"""Folders on servers, of which a local mirror is kept, and sets of shards that are larger than the disk."""

from typing import TYPE_CHECKING

from lit_data.core.lazy import offer

if TYPE_CHECKING:
    from lit_data.wings.remote.mirror import Root

__all__ = [
    "Root",
]

__getattr__, __dir__ = offer(
    __name__,
    {
        "Root": "mirror",
    },
)
