"""Sets larger than the disk: decoded images in shards on a server or a network disk, fetched as an epoch needs them."""
