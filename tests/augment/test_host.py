"""Transforms of albumentations and torchvision that run in the workers: exact, and masks and boxes along."""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_data.app.configuration.compose import compose
from lit_data.app.configuration.targets import instantiate
from lit_data.app.show import draw_samples
from lit_data.augment import Albumentations, Geometry, Pipeline, Torchvision
from lit_data.augment.host import HostRows
from lit_data.core.errors import ConfigError
from lit_data.core.mosaic import MosaicSpec
from lit_data.datamodules import InspectionDataModule, LabelledImageDataModule, StripeDataModule
from lit_data.loading import LoaderOptions, MicroBatchLoader
from lit_data.synthesis import DefectSpec
from lit_data.wings.detection import DetectionDataModule

SMALL = {"count": 8, "size_px": [96, 128], "seed": 0}


def _library() -> Any:
    return pytest.importorskip("albumentations")


def _varied() -> Albumentations:
    A = _library()
    steps = [A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=0.7), A.GaussNoise(p=0.7)]
    return Albumentations([*steps, A.Affine(rotate=(-20, 20), p=0.7)])


def _open(kind: Any = InspectionDataModule, *, folder: Path, **options: Any) -> Any:
    loader = options.pop("loader", LoaderOptions(batch_size=4, num_workers=0, seed=3))
    samples = {"count": 4} if kind is StripeDataModule else SMALL
    data = kind(cache_dir=folder, samples=samples, loader=loader, **options)
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def _by_index(batches: Iterator[dict[str, Tensor]]) -> dict[int, tuple[bytes, bytes]]:
    """Pixels and mask of each sample."""
    samples = {}
    for batch in batches:
        for index, image, mask in zip(batch["index"], batch["image"], batch["mask"], strict=True):
            samples[int(index)] = image.numpy().tobytes(), mask.numpy().tobytes()
    return samples


def test_a_sample_is_the_same_for_any_worker_batch_and_rank(cache: Path) -> None:
    data = _open(folder=cache, augment=_varied(), patch_px=32)
    expected = _by_index(iter(data.make_loader("train")))
    assert len(expected) > 20
    plain = _open(folder=cache, patch_px=32)
    changed = [
        expected[key] != image for key, image in _by_index(iter(plain.make_loader("train"))).items()
    ]
    assert np.mean(changed) > 0.9  # steps are drawn apart from each other
    rows = data.make_loader("train").dataset
    assert isinstance(rows, HostRows)
    processes = LoaderOptions(batch_size=8, num_workers=2, worker_kind="process", seed=3)
    loader = MicroBatchLoader(rows, processes, shuffle=True, rank=0, world_size=1)
    assert _by_index(iter(loader)) == expected
    assert _by_index(iter(loader)) != expected  # another epoch
    loader.close()
    shares: dict[int, tuple[bytes, bytes]] = {}
    for rank in range(2):
        options = LoaderOptions(batch_size=4, num_workers=0, seed=3)
        shares |= _by_index(
            iter(MicroBatchLoader(rows, options, shuffle=True, rank=rank, world_size=2))
        )
    assert shares == {index: expected[index] for index in shares}
    assert len(shares) >= len(expected) - 1


def test_a_resumed_epoch_goes_on_with_the_same_pixels(cache: Path) -> None:
    data = _open(folder=cache, augment=_varied(), patch_px=32)
    loader = data.make_loader("train")
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = _by_index(batches)
    resumed = data.make_loader("train")
    resumed.load_state_dict(state)
    assert _by_index(iter(resumed)) == rest


def test_threads_are_not_taken_as_the_library_draws_from_shared_generators(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads = LoaderOptions(batch_size=4, num_workers=2, worker_kind="thread")
    loader = _open(folder=cache, augment=_varied(), loader=threads).make_loader("train")
    assert loader.choice.kind == "inline"
    assert "set worker_kind=process" in caplog.text


def _flip_of(library: str) -> Any:
    if library == "albumentations":
        return Albumentations([_library().HorizontalFlip(p=1.0)])
    pytest.importorskip("torchvision")
    from torchvision.transforms import v2

    return Torchvision([v2.RandomHorizontalFlip(p=1.0)])


@pytest.mark.parametrize("library", ["albumentations", "torchvision"])
def test_masks_move_with_their_images(library: str, cache: Path) -> None:
    plain, flipped = _open(folder=cache), _open(folder=cache, augment=_flip_of(library))
    for before, after in zip(_first(plain), _first(flipped), strict=True):
        assert before["mask"].any()
        assert torch.equal(before["image"].flip(3), after["image"])
        assert torch.equal(before["mask"].flip(3), after["mask"])
        break
    # Validation is left alone.
    [before, *_], [after, *_] = (list(data.make_loader("val")) for data in (plain, flipped))
    assert torch.equal(before["image"], after["image"])


def _first(data: Any) -> Iterator[dict[str, Tensor]]:
    for batch in data.make_loader("train"):
        yield data.transform(batch, "train")


@pytest.mark.parametrize("library", ["albumentations", "torchvision"])
def test_boxes_move_with_their_images(library: str, cache: Path) -> None:
    kind: Any = DetectionDataModule
    size = {"size_px": 96, "mosaic": None}
    before = next(_first(_open(kind, folder=cache, **size)))
    after = next(_first(_open(kind, folder=cache, augment=_flip_of(library), **size)))
    assert torch.equal(before["image"].flip(3), after["image"])
    assert torch.equal(before["boxes_count"], after["boxes_count"])
    assert len(before["boxes"]) > 0
    mirrored = before["boxes"].clone()
    mirrored[:, 2] = 1 - mirrored[:, 2]
    assert torch.allclose(mirrored, after["boxes"], atol=1e-5)


def test_boxes_that_leave_the_image_are_left_out(cache: Path) -> None:
    A = _library()
    away = Albumentations([A.Affine(translate_percent={"x": (0.5, 0.5), "y": (0, 0)}, p=1.0)])
    options = {"size_px": 96, "mosaic": None}
    before = next(_first(_open(DetectionDataModule, folder=cache, **options)))
    after = next(_first(_open(DetectionDataModule, folder=cache, augment=away, **options)))
    left = before["boxes"][:, 2] + before["boxes"][:, 4] / 2 < 0.45
    gone = before["boxes"][:, 2] - before["boxes"][:, 4] / 2 > 0.5
    assert 0 < left.sum() <= len(after["boxes"]) <= len(before["boxes"]) - gone.sum()
    assert gone.any()
    assert after["boxes_count"].sum() == len(after["boxes"])


def test_target_and_references_move_alike_and_drawn_defects_with_them(cache: Path) -> None:
    drawn = {"synthesis": DefectSpec(probability=1.0), "backend": "cpu"}
    before = next(_first(_open(StripeDataModule, folder=cache, **drawn)))
    flip = _flip_of("albumentations")
    for backend in ("cpu", "device"):  # workers draw all the same
        drawn["backend"] = backend
        after = next(_first(_open(StripeDataModule, folder=cache, augment=flip, **drawn)))
        assert before["mask"].any()
        assert torch.equal(before["image"].flip(3), after["image"])
        assert torch.equal(before["mask"].flip(3), after["mask"])


def test_labelled_images_are_augmented(cache: Path) -> None:
    before = next(_first(_open(LabelledImageDataModule, folder=cache)))
    flip = _flip_of("albumentations")
    after = next(_first(_open(LabelledImageDataModule, folder=cache, augment=flip)))
    assert torch.equal(before["image"].flip(3), after["image"])
    assert torch.equal(before["label"], after["label"])


def test_the_file_of_a_user_serves_as_the_list_does(cache: Path, tmp_path: Path) -> None:
    A = _library()
    path = tmp_path / "mäine.yaml"
    params = A.BboxParams(format="coco", label_fields=["x"], min_visibility=0.3)
    whole = A.Compose([A.HorizontalFlip(p=1.0), A.GaussNoise(p=1.0)], bbox_params=params)
    A.save(whole, str(path), data_format="yaml")
    listed = _open(folder=cache, augment=Albumentations(whole.transforms))
    for transforms in (str(path), A.to_dict(whole), whole):
        stored = _open(folder=cache, augment=Albumentations(transforms))
        assert torch.equal(next(_first(listed))["image"], next(_first(stored))["image"])


def test_a_transform_of_the_device_may_follow_one_of_the_workers(cache: Path) -> None:
    flip, back = _flip_of("albumentations"), Geometry(turn=False, shift_px=0)
    with pytest.raises(ConfigError, match="come first in a pipeline"):
        Pipeline([back, flip])
    after = next(_first(_open(folder=cache, augment=Pipeline([flip, back]))))
    assert after["image"].shape == (4, 3, 128, 128)


def test_show_draws_samples_before_and_after(cache: Path, tmp_path: Path) -> None:
    from lit_data.predict import find_task

    data = _open(folder=cache, augment=_flip_of("albumentations"))
    planned, rows = draw_samples(data, tmp_path / "samples.png", stage="train", count=2)
    before = data.inspect("train").draw(planned["unchanged"])
    assert torch.equal(before["image"].flip(3), data.finish_batch(planned, "train")["image"])
    find_task(data).draw_augmented(planned, rows, tmp_path / "augment.png", stage="train")
    assert (tmp_path / "augment.png").is_file()


def _refused(name: str) -> tuple[Any, str]:
    A = _library()
    with warnings.catch_warnings(action="ignore"):
        unnamed = A.Lambda(image=lambda image, **_: image)
    return {
        "size": (A.Resize(64, 64), "end with Resize, RandomCrop or PadIfNeeded to 128 x 128"),
        "floats": (A.Normalize(), "remove Normalize"),
        "tensors": (A.pytorch.ToTensorV2(), "remove Normalize, ToFloat and ToTensorV2"),
        "lambda": (unnamed, "instead of lambdas"),
        "module": (nn.Identity(), "is not a transform of albumentations"),
    }[name]


@pytest.mark.strangers
@pytest.mark.parametrize("name", ["size", "floats", "tensors", "lambda", "module"])
def test_what_does_not_fit_is_refused_with_the_cure(name: str, cache: Path) -> None:
    pytest.importorskip("albumentations.pytorch")
    step, message = _refused(name)
    with pytest.raises(ConfigError, match=message):
        next(_first(_open(folder=cache, augment=Albumentations([step]))))


def test_places_where_workers_come_too_soon_are_refused(cache: Path) -> None:
    flip = _flip_of("albumentations")
    with pytest.raises(
        ConfigError, match="synthetic defects of these images are drawn on the device"
    ):
        next(_first(_open(folder=cache, augment=flip, synthesis=DefectSpec())))
    device = {"cache": "device", "synthesis": DefectSpec()}
    with pytest.raises(ConfigError, match=r"set data\.cache=store"):
        next(_first(_open(StripeDataModule, folder=cache, augment=flip, **device)))
    with pytest.raises(ConfigError, match="mosaic_on=worker"):
        _open(
            DetectionDataModule, folder=cache, augment=flip, mosaic=MosaicSpec(), mosaic_on="device"
        )


def test_the_yaml_files_make_what_they_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _library()
    words = ["+experiment=segmentation", f"paths.run={tmp_path}"]
    cfg = compose("fit", [*words, "augment=albumentations"])
    assert isinstance(instantiate(cfg.data.augment), Albumentations)
    broken = compose(
        "fit", [*words, "augment=albumentations", f"data.augment.transforms={tmp_path}/no.yaml"]
    )
    with pytest.raises(ConfigError, match=r"albumentations cannot read .*no\.yaml"):
        instantiate(broken.data.augment)
    monkeypatch.setitem(sys.modules, "albumentations", None)
    with pytest.raises(ConfigError, match=r"pip install 'lit-data-inspect\[augment\]'"):
        Albumentations([])
