"""Data sets that lie on a server: a folder of it becomes a local mirror, once for each machine.

Everything behind this room reads plain local files: decoders, memory maps, workers and their forks
never see a connection. Read `lit_data.io.remote.mirror` first.
"""

from lit_data.io.remote.address import check_root
from lit_data.io.remote.options import RemoteOptions
from lit_data.io.remote.root import Root, check_plain, check_words
from lit_data.io.remote.scope import Scope

__all__ = ["RemoteOptions", "Root", "Scope", "check_plain", "check_root", "check_words"]
