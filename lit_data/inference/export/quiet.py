"""Work whose libraries say much that is for their own developers."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_noise() -> Iterator[None]:
    """Hold back warnings, of the log too: of CUDA libraries that are not there, of what torch deprecates in torch."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
