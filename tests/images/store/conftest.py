"""Stores of small images that tests of this room share."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from lit_data.core.types import Array
from lit_data.images import DecodedStore, ImageDecoder, ImageSource, StoreOptions


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., DecodedStore]:
    """Builds a store of images, each in a file of its own that is written once."""

    def make(images: Sequence[Array], **options: object) -> DecodedStore:
        sources = []
        for number, image in enumerate(images):
            path = tmp_path / f"{number}.npy"
            if not path.exists():
                np.save(path, image)
            sources.append(ImageSource((str(path),)))
        store = StoreOptions(**options)
        return DecodedStore.build(sources, tmp_path / "cache", decoder=ImageDecoder(), store=store)

    return make
