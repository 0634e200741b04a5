"""`predict.onnx`: what is compared and written before anything is predicted."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_data.cli import main
from lit_data.errors import ConfigError, DataError
from lit_data.inference.export.onnx_file import OnnxFile
from lit_data.modules import SegmentationModule, UNet
from lit_data.tasks import nets as predict_convert
from lit_data.tasks import watermarks as watermark_predict
from lit_data.tasks.maps import WholeImages
from lit_data.tasks.nets import read_tiles, write_onnx
from lit_data.tasks.options import PredictOptions

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")

SIZES = [(40, 50), (8, 100), (64, 64), (1, 1), (30, 8), (90, 70)]


class Bank:
    """Images in memory; one of them is bad."""

    channels = 3

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if SIZES[number] == (1, 1):
            raise DataError("3.png: it is bad")
        return np.full((3, *SIZES[number]), 20 * number, np.uint8)


class Marks(nn.Conv2d):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).sigmoid()


def make_images(value_range: tuple[float, float] | None = None) -> WholeImages:
    names = [f"{number}.png" for number in range(len(SIZES))]
    return WholeImages(bank=Bank(), names=names, channels=(0, 1, 2), value_range=value_range)  # type: ignore[arg-type]


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return Marks(3, 1, 3, padding=1)


def test_tiles_are_cut_from_the_middle_and_bad_images_left_out() -> None:
    tiles = read_tiles(make_images(), (32, 48), 100)
    assert {tuple(tile.shape) for tile in tiles} == {(3, 32, 48)}
    assert sorted(round(255 * float(tile.mean())) for tile in tiles) == [0, 20, 40, 80, 100]
    stretched = read_tiles(make_images((0.0, 100.0)), (32, 48), 100)
    assert max(float(tile.max()) for tile in stretched) == 1
    assert 1 <= len(read_tiles(make_images(), (32, 48), 2)) <= 2


def test_the_net_is_written_with_images_of_the_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(net: nn.Module, path: str, images: list[Tensor]) -> OnnxFile:
        assert {tuple(image.shape) for image in images} == {(3, 32, 32)}
        return OnnxFile(Path(path), ("batch",), 1e-6)

    monkeypatch.setattr(predict_convert, "export_onnx", write)
    net = make_net()
    options = PredictOptions(onnx=str(tmp_path / "net.onnx"), tile_px=32)
    assert write_onnx(net, make_images(), options) == {"predict/onnx_max_difference": 1e-6}
    assert write_onnx(net, make_images(), PredictOptions()) == {}


def test_nets_elsewhere_and_sets_of_bad_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    options = PredictOptions(onnx="net.onnx")
    with pytest.raises(ConfigError, match=r"^predict\.onnx is for the CPU: add trainer=cpu$"):
        write_onnx(make_net().to("meta"), make_images(), options)
    monkeypatch.setattr(Bank, "__getitem__", _fail)
    with pytest.raises(DataError, match=r"^none of the images that a net would be checked"):
        write_onnx(make_net(), make_images(), options)


@pytest.mark.slow  # loads the exporter, which takes most of the time
@pytest.mark.skipif(
    find_spec("onnxscript") is None, reason="needs onnxscript: pip install -e '.[export]'"
)
@pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning")
def test_predict_writes_its_net(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watermark_predict, "SHOWN", 1)
    (tmp_path / "set").mkdir()
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / "set" / f"{number}.png"), pixels)
    model = SegmentationModule(UNet(width=2, depth=1), false_alarms_per_patch=None, baseline=False)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "model.ckpt")
    words = ["predict", "experiment=watermark", "trainer=cpu", "trainer.enable_progress_bar=false"]
    words += ["model.net.width=2", "model.net.depth=1", f"data.root={tmp_path}/set"]
    words += ["predict.tile_px=64"]
    words += [f"paths.runs={tmp_path}/runs", f"paths.cache={tmp_path}/cache"]
    assert main([*words, f"ckpt={tmp_path}/model.ckpt", f"predict.onnx={tmp_path}/net.onnx"]) == 0
    summary = json.loads(Path(capsys.readouterr().out.splitlines()[-1]).read_text())
    assert summary["predict/images"] == 2
    assert summary["predict/onnx_max_difference"] < 1e-4
    assert (tmp_path / "net.onnx").stat().st_size > 1000


def _fail(bank: Bank, number: int) -> None:
    raise DataError("it is bad")
