"""Datasets larger than the disk: decoded images in shards on a server or network disk, fetched on demand."""
