"""A memory bank in a file: its maps and verdicts are those of `predict`, on images of any size."""

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from lit_data.datamodules import InspectionDataModule
from lit_data.loading import LoaderOptions
from lit_data.models import AnomalyModule, MemoryBank
from lit_data.models.anomaly import encoder
from lit_data.models.anomaly.bank import find_distances
from lit_data.predict import PredictOptions, find_task
from lit_data.predict.options import ExportRequest
from lit_data.wings.export.encode import encode_file
from lit_inspect.__main__ import main
from lit_inspect.inspector import Inspector
from tests.helpers.reading import opened
from tests.predict.running import predict, read_rows

OPTIONS = {"tile_px": 128, "overlap_px": 32, "image_score_fraction": 0.0, "image_threshold": 0.5}
SIZES = [(1, 1), (5, 70), (33, 20), (60, 61), (128, 128), (150, 201)]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number, (height, width) in enumerate(SIZES):
        waves = np.tile(0.5 + 0.2 * np.sin(np.arange(width) + number), (height, 1))
        waves += rng.normal(0, 0.02, waves.shape)
        waves[60:80, 40:60] = 0.9
        cv2.imwrite(str(folder / f"{number}.png"), (255 * waves.clip(0, 1)).astype(np.uint8))
    return folder


def _fit() -> AnomalyModule:
    """Return a module whose bank is that of one image of waves."""
    model = AnomalyModule(None, MemoryBank(700, candidates=1024, whiten=False))
    waves = torch.linspace(0, 128, 128).sin().mul(0.2).add(0.5).expand(1, 3, 128, 128)
    waves = waves + 0.02 * torch.randn(waves.shape, generator=torch.Generator().manual_seed(0))
    model.training_step({"image": waves.contiguous()}, 0)
    model.on_train_epoch_end()
    model.threshold = 15 * model.threshold  # other waves than those are good as well
    return model.eval()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You are trying to .self.log")
def test_maps_and_verdicts_are_those_of_predict(images: Path, tmp_path: Path) -> None:
    data = InspectionDataModule(
        str(images),
        cache_dir=str(tmp_path),
        splits={"train": 1.0},
        loader=LoaderOptions(batch_size=2, num_workers=0),
    )
    opened(data, "predict")
    model = _fit()
    predict(data, model, tmp_path / "one", **OPTIONS)
    path = tmp_path / "a.inspect"
    request = ExportRequest(model=model, options=PredictOptions(**OPTIONS), doubt=None)
    path.write_bytes(encode_file(find_task(data).export(request)))
    tiling = Inspector(path).settings.tiling
    assert tiling is not None
    assert tiling.round_px == 1  # sides are free
    assert main([str(path), str(images), "--out", str(tmp_path / "other")]) == 0
    tables = [read_rows(tmp_path / name / "images.csv") for name in ("one", "other")]
    for row, other in zip(*tables, strict=True):
        score = pytest.approx(float(other.pop("score")), abs=1.2e-4)  # a digit of the table
        assert float(row.pop("score")) == score
        assert row == other
    assert {row["verdict"] for row in tables[0]} == {"good", "defect"}
    differences = []
    for number in range(len(SIZES)):
        maps = []
        for folder in ("one", "other"):
            stored = cv2.imread(str(tmp_path / folder / "maps" / f"{number}.png.png"), -1)
            maps.append(stored.astype(int))
        differences.append(np.abs(maps[0] - maps[1]).ravel())
    assert np.concatenate(differences).max() <= 3
    assert (np.concatenate(differences) <= 1).mean() >= 0.9999


def test_a_graph_pads_and_measures_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, bank = torch.randn(20, 5, generator=generator), torch.randn(1100, 5, generator=generator)
    cases = []
    for sides in ((1, 1), (1, 9), (6, 7), (7, 6), (7, 7), (20, 30)):
        for padding in ((6, 6, 6, 6), (0, 7, 0, 0), (1, 1, 0, 0)):
            cases.append((torch.rand(1, 2, *sides, generator=generator), padding))
    padded = [encoder.pad_reflected(maps, *padding) for maps, padding in cases]
    distances = find_distances(rows, bank)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    for (maps, padding), expected in zip(cases, padded, strict=True):
        assert torch.equal(encoder.pad_reflected(maps, *padding), expected)
    torch.testing.assert_close(find_distances(rows, bank), distances)
