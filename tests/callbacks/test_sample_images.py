from pathlib import Path
from typing import Any

import cv2
import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lit_data.callbacks import ImageMetrics, SampleImages
from lit_data.callbacks.pictures import read_images
from lit_data.core.errors import ConfigError
from lit_data.testing import QUIET
from tests.callbacks.painter import Album, Painter, Sculptor
from tests.helpers.notes import Notes

POSES = torch.tensor([[0.25, 0.0], [0.5, 0.1], [0.75, 0.2]])

pytestmark = pytest.mark.usefixtures("small_runs_are_fast")


class Gallery(Notes):
    """A logger that takes pictures, as that of Weights & Biases does."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures = []

    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        self.pictures += [(key, image.shape, step) for image in images]


def _fit(
    folder: Path,
    model: LightningModule,
    *callbacks: Callback,
    data: Any = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> Trainer:
    steps = {"max_epochs": 1, "limit_val_batches": 0, "log_every_n_steps": 4}
    settings = QUIET | steps | {"default_root_dir": folder} | options
    trainer = Trainer(**settings, callbacks=list(callbacks))
    torch.manual_seed(1)
    trainer.fit(model, datamodule=data or Album(), ckpt_path=ckpt_path)
    return trainer


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "images").iterdir())


def test_pictures_come_every_n_steps_and_at_the_end(tmp_path: Path) -> None:
    model = Painter()
    _fit(tmp_path, model, SampleImages(every_n_steps=3, count=5, batch_size=2, seed=3))  # 6 batches
    assert _names(tmp_path) == ["step-000003.png", "step-000006.png"]
    assert model.calls == [(5, 3, 2)] * 2
    early, late = (cv2.imread(str(tmp_path / "images" / name)) for name in _names(tmp_path))
    assert early.shape == (2 * 66 + 2, 3 * 66 + 2, 3)  # cells of 8 px are enlarged to 64
    assert late[:60, :60].mean() > early[:60, :60].mean()  # it learns the brightness


def test_objects_are_shown_from_the_sides_of_the_data(tmp_path: Path) -> None:
    _fit(tmp_path, Sculptor(), SampleImages(every_n_steps=6, objects=2), data=Album(POSES))
    picture = cv2.imread(str(tmp_path / "images" / "views-000006.png"))
    assert picture.shape == (2 * 66 + 2, 3 * 66 + 2, 3)
    assert [int(picture[30, 66 * view + 30, 0]) for view in range(3)] == [64, 128, 191]


def test_loggers_that_take_pictures_get_them(tmp_path: Path) -> None:
    gallery, board = Gallery(), TensorBoardLogger(tmp_path, name="", version="")
    callback = SampleImages(every_n_steps=6, path=tmp_path / "own")
    _fit(tmp_path, Sculptor(), callback, data=Album(POSES), logger=[gallery, board, Notes()])
    sizes = {"images/samples": (266, 266, 3), "images/views": (266, 200, 3)}
    assert gallery.pictures == [(key, size, 5) for key, size in sizes.items()]
    assert (tmp_path / "own" / "images" / "step-000006.png").is_file()
    (events,) = tmp_path.glob("events*")
    for key in (b"images/samples", b"images/views"):
        assert key in events.read_bytes()


def test_training_goes_on_as_without_it(tmp_path: Path) -> None:
    plain, watched = Painter(), Painter()
    _fit(tmp_path, plain)
    metrics = ImageMetrics(every_n_steps=2, count=4)
    _fit(tmp_path, watched, SampleImages(every_n_steps=2), metrics, limit_val_batches=1)
    assert watched.drawn == plain.drawn


def test_it_goes_on_after_a_resume(tmp_path: Path) -> None:
    _fit(tmp_path, Painter(), SampleImages(every_n_steps=4)).save_checkpoint(tmp_path / "last.ckpt")
    callback = SampleImages(every_n_steps=4)
    _fit(tmp_path, Painter(), callback, max_epochs=2, ckpt_path=str(tmp_path / "last.ckpt"))
    assert _names(tmp_path) == [f"step-{step:06d}.png" for step in (4, 6, 8, 12)]


def test_what_cannot_be_drawn_or_written_is_refused(tmp_path: Path) -> None:
    class Careless(Painter):
        def sample_images(self, count: int, *, seed: int, batch_size: int) -> Tensor:
            return torch.rand(batch_size, 3, 8, 8)

    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="SampleImages: BoringModel has no method sample_images"):
        _fit(tmp_path, BoringModel(), SampleImages())
    with pytest.raises(ConfigError, match="is a file: name a folder, images will be in it"):
        _fit(tmp_path, Painter(), SampleImages(path=tmp_path / "file"))
    text = r"sample_images returned a tensor of shape \(2, 3, 8, 8\): 4 dimensions"
    with pytest.raises(ConfigError, match=text):
        _fit(tmp_path, Careless(), SampleImages(every_n_steps=1, count=5, batch_size=2))


def test_nothing_is_drawn_into_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Painter()
    _fit(tmp_path, model, SampleImages(every_n_steps=2))
    assert list(tmp_path.iterdir()) == []
    assert model.calls == []
    assert "SampleImages draws nothing without a logger: give it path=FOLDER" in caplog.messages


def test_images_are_found_in_any_batch() -> None:
    images, labels = torch.rand(2, 3, 4, 4), torch.zeros(2)
    for batch in ({"image": images, "label": labels}, (labels, images), [images], images):
        assert read_images(batch, "image") is images
    text = r"key='photo': the batch has no images .* its keys are image, label"
    with pytest.raises(ConfigError, match=text):
        read_images({"image": images, "label": labels}, "photo")
    with pytest.raises(ConfigError, match="key='image': the batch has no images"):
        read_images((labels,), "image")
