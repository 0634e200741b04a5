"""A process that reads images when it is told to; it imports nothing that would take longer than reading."""

import os
from multiprocessing.connection import Connection
from typing import Any


def serve_reads(pipe: Connection, bank: Any) -> None:  # noqa: ANN401 - an `ImageBank`, whose module need not be loaded
    """Answer each word with the process number, until none comes; at ``read`` touch every page of every image first."""
    while (word := pipe.recv()) is not None:
        if word == "read":
            for number in range(len(bank)):
                bank[number].max()
        pipe.send(os.getpid())
