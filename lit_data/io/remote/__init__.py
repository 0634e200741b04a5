"""Datasets that lie on a server: a folder of it becomes a local mirror, once for each machine.

Everything behind this room reads plain local files: decoders, memory maps, workers and their forks
never see a connection. Read `lit_data.io.remote.mirror` first. Mirrors and shards share one
`lit_data.io.remote.transport`.
"""

from lit_data.io.remote.mirror import Root
from lit_data.io.remote.options import RemoteOptions, check_plain, check_root, check_words
from lit_data.io.remote.scope import Scope

__all__ = ["RemoteOptions", "Root", "Scope", "check_plain", "check_root", "check_words"]
