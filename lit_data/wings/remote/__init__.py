"""Folders on servers with local mirrors, and datasets in shards that are larger than the disk."""

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
"""Dotted names of the functions and classes for remote roots, see `lit_data.images.roots`."""

__getattr__, __dir__ = offer(
    __name__,
    {
        "Root": "mirror",
    },
)
