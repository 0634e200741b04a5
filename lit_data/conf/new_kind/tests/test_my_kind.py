"""Samples of this kind of data: what loader and commands rely on, and labels."""

from pathlib import Path

from lit_data.loading import LoaderOptions
from lit_data.testing import check_datamodule, write_images

from my_kind.datamodule import MyKindDataModule


def test_samples_depend_on_index_and_epoch_alone(tmp_path: Path) -> None:
    """The same sample comes out alone, in a batch and in a worker; labels are those of folders."""
    for name in ("dark", "light"):
        write_images(tmp_path / "images" / name, 10)
    data = MyKindDataModule(
        str(tmp_path / "images"),
        cache_dir=str(tmp_path / "cache"),
        loader=LoaderOptions(batch_size=4, num_workers=0),
    )
    check_datamodule(data)
    assert data.classes == ["dark", "light"]
    batch = data.transform(next(iter(data.predict_dataloader())), "predict")
    assert batch["image"].shape == (4, 3, 64, 64)
    assert 0 <= batch["image"].min() < batch["image"].max() <= 1
    assert batch["label"].tolist() == [0, 0, 0, 0]
