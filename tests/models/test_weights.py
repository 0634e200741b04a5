"""Weights that a net starts from: which of a file fit, and what files are refused."""

import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.serialization import set_crc32_options
from torch.testing import assert_close

from lit_data.core.errors import DataError, StoreError
from lit_data.models import ConvClassifier, LiteUNet, UNet
from lit_data.models.weights import fit_channels, load_weights_file
from lit_data.wings.detection import DetectorNet


def _save(state: object, path: Path) -> Path:
    torch.save(state, path)
    return path


def _prefixed(net: nn.Module, prefix: str) -> dict[str, Tensor]:
    return {prefix + name: weight for name, weight in net.state_dict().items()}


NETS = [
    lambda **more: UNet(width=4, depth=2, **more),
    lambda **more: ConvClassifier(3, width=4, depth=2, **more),
    lambda **more: DetectorNet(2, width=4, **more),
    lambda **more: LiteUNet(**{"strides_px": [2, 4], "width": 4, "weights": None, **more}),
]


@pytest.mark.parametrize(
    ("make", "prefix"),
    [
        *((NETS[0], prefix) for prefix in ("", "model.", "module.", "module.model.net.")),
        *((make, "backbone.") for make in NETS[1:]),
    ],
)
def test_each_net_starts_from_another_run(
    make: Callable[..., nn.Module], prefix: str, tmp_path: Path
) -> None:
    first = make()
    path = _save({"epoch": 3, "state_dict": _prefixed(first, prefix)}, tmp_path / "last.ckpt")
    second = make(weights=str(path))
    assert all(
        torch.equal(weight, second.state_dict()[name])
        for name, weight in first.state_dict().items()
    )


def test_a_head_of_other_classes_stays_and_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = ConvClassifier(7, width=4, depth=2), ConvClassifier(3, width=4, depth=2)
    head = second.head.weight.clone()
    state = _prefixed(first, "model.") | {"optimizer.step": torch.ones(1)}
    with caplog.at_level(logging.INFO):
        taken = load_weights_file(second, _save({"model": state}, tmp_path / "a.pth"))
    assert taken is not None
    assert taken.other_shape == ("head.weight", "head.bias")
    assert (taken.missing, taken.unused) == ((), ("optimizer.step",))
    assert torch.equal(second.head.weight, head)
    assert torch.equal(second.layers[0].weight, first.layers[0].weight)
    assert "12 of 14 weights of the net come from" in caplog.text
    assert "2 have another shape there (head.weight, head.bias)" in caplog.text


def test_kernels_of_rgb_serve_grey_images(tmp_path: Path) -> None:
    first, grey = UNet(width=4, depth=1), torch.rand(2, 1, 16, 16)
    path = _save(first.state_dict(), tmp_path / "rgb.pt")
    second = UNet(width=4, depth=1, channels=1, weights=path)
    as_rgb = first.eval()(grey.expand(-1, 3, -1, -1))
    assert_close(second.eval()(grey), as_rgb, rtol=1e-4, atol=1e-5)
    five = fit_channels(torch.ones(2, 3, 1, 1), 5)
    assert_close(five.sum(1).flatten(), torch.full((2,), 3.0))


class _Hostile:
    def __reduce__(self) -> Any:
        return os.mkdir, ("hostile",)


def _pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _tensors(value: Tensor) -> dict[str, Tensor]:
    return {"head.weight": value.expand(1, 4, 1, 1)}


def _flip_bit(path: Path) -> Path:
    """Change one bit of a weight."""
    data = path.read_bytes()
    weight = np.float32(0.3).tobytes()
    assert data.count(weight) == 1
    return _written(path, data.replace(weight, np.float32(0.4).tobytes()))


UNREAD = "is not a readable checkpoint"
REFUSED = {
    "missing": (lambda at: at / "no.pt", DataError, "no.pt: no such file; .* give a .pt"),
    "folder": (lambda at: at, DataError, "not a regular file .a folder.; give a .pt"),
    "pipe": (lambda at: _pipe(at / "pipe.pt"), DataError, "not a regular file .a named pipe."),
    "hostile": (
        lambda at: _save({"a": _Hostile()}, at / "a.pt"),
        StoreError,
        "damaged, or holds more than data",
    ),
    "pickle": (
        lambda at: _written(at / "a.pt", pickle.dumps(_Hostile(), protocol=2)),
        StoreError,
        UNREAD,
    ),
    "text": (lambda at: _written(at / "a.pth", b"hello"), StoreError, UNREAD),
    "empty": (lambda at: _written(at / "a.pt", b""), DataError, "0 bytes; give a .pt"),
    "bit": (
        lambda at: _flip_bit(_save(_tensors(torch.tensor(0.3)), at / "a.pt")),
        StoreError,
        f"{UNREAD}: it is damaged",
    ),
    "list": (lambda at: _save([torch.ones(2)], at / "a.pt"), StoreError, "it holds a list"),
    "numbers": (lambda at: _save({"epoch": 1}, at / "a.pt"), StoreError, "its keys are epoch"),
    "nothing fits": (
        lambda at: _save({"fc.weight": torch.ones(2, 2)}, at / "a.pt"),
        StoreError,
        "has no weight that fits UNet: the file holds fc.weight, the net stem.0.weight",
    ),
    "NaN": (
        lambda at: _save(_tensors(torch.tensor(torch.nan)), at / "a.pt"),
        StoreError,
        "holds NaN in 1 of 1 weight, first in head.weight",
    ),
    "whole numbers": (
        lambda at: _save(_tensors(torch.tensor(1)), at / "a.pt"),
        StoreError,
        "has no weight that fits",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, kind, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    net = UNet(width=4, depth=1)
    before = {name: weight.clone() for name, weight in net.state_dict().items()}
    with pytest.raises(kind, match=message) as caught:
        load_weights_file(net, make(tmp_path))
    assert "\n" not in str(caught.value)
    assert not Path("hostile").exists()
    assert all(torch.equal(weight, before[name]) for name, weight in net.state_dict().items())


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    first = UNet(width=4, depth=1)
    path = tmp_path / "a.pt"
    set_crc32_options(False)
    try:
        _save(first.state_dict(), path)
    finally:
        set_crc32_options(True)
    assert torch.equal(UNet(width=4, depth=1, weights=path).head.weight, first.head.weight)


def test_safetensors_are_read_and_damaged_ones_refused(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    first = UNet(width=4, depth=1)
    path = tmp_path / "a.safetensors"
    library.save_file(_prefixed(first, "module."), path)
    assert torch.equal(UNet(width=4, depth=1, weights=path).head.weight, first.head.weight)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(StoreError, match="is not a readable safetensors file"):
        UNet(width=4, depth=1, weights=path)
