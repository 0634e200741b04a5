"""Folders on servers, of which a local mirror is kept, and sets of shards that are larger than the disk."""

from typing import TYPE_CHECKING

from lit_data.core.lazy import offer

if TYPE_CHECKING:
    from lit_data.wings.remote.mirror import Root

__all__ = [
    "Root",
]

ROOTS = {
    "mirror": f"{__name__}.mirror.Root",
    "store": f"{__name__}.transport.ServerTransport",
    "image_shards": f"{__name__}.shards.store.ShardedImages",
    "write_shards": f"{__name__}.shards.publish.write_shards",
}
"""Dotted names of what opens and writes roots that lie elsewhere, see `lit_data.images.roots`."""

__getattr__, __dir__ = offer(
    __name__,
    {
        "Root": "mirror",
    },
)
