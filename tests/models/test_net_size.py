"""Nets of somebody's file are no larger than the file."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lit_data.core.errors import ConfigError, StoreError
from lit_data.models import ConvClassifier, UNet
from lit_data.models.net_size import check_numbers, refusing_larger
from lit_data.models.weights import read_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "best.ckpt"
    torch.save({"state_dict": UNet(width=4).state_dict()}, path)
    return path


@pytest.mark.parametrize("width", [20_000, 10**6, 10**12])
def test_a_net_is_refused_before_it_takes_memory(width: int, checkpoint: Path) -> None:
    with (
        pytest.raises(StoreError, match=r"describes a net "),
        refusing_larger(checkpoint, is_ours=True),
    ):
        UNet(width=width)
    assert UNet(width=4)  # nothing is counted any more


def test_a_net_of_endless_parts_is_refused(checkpoint: Path) -> None:
    parts = map(nn.Identity, range(10**9))
    with pytest.raises(StoreError, match="more values"), refusing_larger(checkpoint, is_ours=True):
        nn.Sequential(nn.Identity()).extend(parts)


def test_the_net_of_the_file_is_built(checkpoint: Path) -> None:
    check_numbers({"width": 4, "classes": ["a", "b"]}, checkpoint)
    with refusing_larger(checkpoint, is_ours=True):
        UNet(width=4).load_state_dict(read_checkpoint(checkpoint)["state_dict"])


def test_sizes_beyond_the_file_are_refused(checkpoint: Path) -> None:
    with pytest.raises(StoreError, match="sizes that are larger than the file"):
        check_numbers({"inner": [{"classes": 10**400}]}, checkpoint)


@pytest.mark.parametrize("kind", [UNet, ConvClassifier])
def test_depth_is_bounded(kind: type[nn.Module]) -> None:
    with pytest.raises(
        ConfigError, match=r"depth=1000000000 is not usable: choose .* from 1 to 12"
    ):
        kind(depth=10**9)


def test_a_tensor_that_repeats_what_is_stored_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "w.ckpt"
    torch.save({"state_dict": {"w": torch.zeros(1).expand(1000)}}, path)
    assert read_checkpoint(path)["state_dict"]["w"].shape == (1000,)
    torch.save({"state_dict": {"w": torch.zeros(1).expand(2**40)}}, path)
    with pytest.raises(StoreError, match=r"a tensor of \[1099511627776\] has 4 bytes in the file"):
        read_checkpoint(path)
