"""ONNX files: what onnxruntime makes of them, and nets of which there can be none."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_data.core.errors import ConfigError, DataError
from lit_data.models import UNet
from lit_data.wings.export import export_onnx, onnx_file

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")

IMAGE = torch.rand(3, 16, 24, generator=torch.Generator().manual_seed(0))


class Fixed(nn.Conv2d):
    """Takes tiles of one size."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + torch.arange(24) / 24


class Asking(nn.Conv2d):
    """Does what depends on the pixels."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images if images.mean() > 0 else -images)


@pytest.fixture
def extra() -> None:
    for name in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(name, reason=f"needs {name}: pip install -e '.[export]'")


@pytest.mark.slow  # the exporter takes ten seconds to load
@pytest.mark.usefixtures("extra")
def test_the_file_gives_the_values_of_the_net_for_any_size(tmp_path: Path) -> None:
    import onnxruntime

    torch.manual_seed(0)
    net = UNet(width=4, depth=1).eval()
    written = export_onnx(net, tmp_path / "out" / "net.onnx", [IMAGE, IMAGE[:, :9, :13]])
    assert written.free_axes == ("batch", "height", "width")
    assert 0 <= written.max_difference <= 1e-5
    assert [path.name for path in written.path.parent.iterdir()] == ["net.onnx"]
    model, cpu = written.path.read_bytes(), ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model, providers=cpu)
    for shape in ((1, 3, 8, 8), (5, 3, 33, 47)):
        tiles = torch.rand(shape)
        with torch.inference_mode():
            wanted = net(tiles).numpy()
        (found,) = session.run(["probability"], {"images": tiles.numpy()})
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    tied = Fixed(3, 1, 3, padding=1).eval()
    written = export_onnx(tied, tmp_path / "tied.onnx", [IMAGE, IMAGE[:, :9, :13]])
    assert written.free_axes == ("batch", "height")


@pytest.mark.slow  # the exporter takes ten seconds to load
@pytest.mark.usefixtures("extra")
def test_a_file_with_other_values_or_of_a_net_that_cannot_be_traced_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_file, "TOLERANCE", -1.0)
    with pytest.raises(
        DataError, match=r"gives values that differ by .* those of the net, but only -1"
    ):
        export_onnx(nn.Conv2d(3, 1, 1).eval(), tmp_path / "net.onnx", [IMAGE])
    with pytest.raises(ConfigError, match=r"^Asking cannot be .* be one that torch\.export"):
        export_onnx(Asking(3, 1, 1).eval(), tmp_path / "net.onnx", [IMAGE])
    assert not list(tmp_path.iterdir())


def test_a_file_is_checked_with_values_of_the_images() -> None:
    images = [torch.full((3, 24, 40), level) for level in (0.25, 0.5)]
    probes = list(onnx_file.list_probes(images, ("batch", "height", "width")))
    assert [probe.shape[0] for probe in probes] == [1, 1, 1, 3]
    assert probes[-1].shape[2:] == (19, 31)
    assert set(torch.cat([probe.flatten() for probe in probes]).tolist()) == {0.25, 0.5}


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Conv2d(3, 1, 1)
    monkeypatch.setattr(onnx_file, "find_spec", lambda name: name != "onnxscript" or None)
    with pytest.raises(ConfigError, match=r"^ONNX files need onnxscript: pip install onnxscript$"):
        export_onnx(net, tmp_path / "net.onnx", [IMAGE])
    monkeypatch.setattr(onnx_file, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"^net\.pt: a net is written as an \.onnx file$"):
        export_onnx(net, tmp_path / "net.pt", [IMAGE])
    with pytest.raises(ConfigError, match=r"checked with images: give at least one$"):
        export_onnx(net, tmp_path / "net.onnx", [])
