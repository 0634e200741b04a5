import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from lit_data import datamodules
from lit_data.augment import Geometry, SingleTexture, StripeAugment
from lit_data.callbacks import DataWaitMonitor, SampleDigest
from lit_data.core.checks import read_arguments
from lit_data.core.errors import ConfigError, DataError
from lit_data.core.types import Batch, Stage
from lit_data.datamodules import FileOptions, ImageDataModule, StripeDataModule
from lit_data.images.readers import read_image
from lit_data.loading import LoaderOptions
from lit_data.synthesis import DefectSpec
from lit_data.testing import write_images as write_noise
from tests.helpers.reading import Watcher, assert_equal, fit, opened

Make = Callable[..., StripeDataModule]


def write_images(folder: Path, count: int = 10, *, size: tuple[int, int] = (80, 70)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        pixels = rng.integers(60, 180, (*size, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / f"{number:02}.png"), pixels)
    return folder


def write_arrays(folder: Path, dtype: type, size: tuple[int, int]) -> Path:
    """Six images of noise over the whole range of a dtype."""
    folder.mkdir()
    top = 1 if dtype is np.float32 else np.iinfo(dtype).max
    for number in range(6):
        values = np.random.default_rng(number).random((3, *size)) * top
        np.save(folder / f"{number}.npy", values.astype(dtype))
    return folder


def write_grey(folder: Path, count: int = 4) -> Path:
    folder.mkdir()
    for number in range(count):
        pixels = np.random.default_rng(number).integers(60, 180, (64, 64), dtype=np.uint8)
        cv2.imwrite(str(folder / f"{number}.png"), pixels)
    return folder


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(root: Path | None = None, **options: Any) -> StripeDataModule:
        root = root or write_images(tmp_path / "images")
        loader = {"batch_size": 4, "num_workers": 0, **options.pop("loader", {})}
        places = {"patch_px": 32, "stride_px": 24, "cache_dir": tmp_path / "cache"}
        defaults = {"synthesis": DefectSpec(probability=1.0), "loader": LoaderOptions(**loader)}
        return opened(StripeDataModule(str(root), **(places | defaults | options)))

    return build


def _batches(datamodule: StripeDataModule, stage: Stage, epoch: int = 0) -> list[Batch]:
    loader = datamodule.make_loader(stage)
    loader.set_epoch(epoch)
    return [datamodule.transform(batch, stage) for batch in loader]


def _digest(batches: list[Batch]) -> str:
    samples = {}
    for batch in batches:
        for n, index in enumerate(batch["index"].tolist()):
            samples[index] = b"".join(
                batch[key][n].numpy().tobytes() for key in ("image", "mask", "position")
            )
    return hashlib.sha256(b"".join(samples[index] for index in sorted(samples))).hexdigest()


def test_the_batch_is_what_the_table_says(make: Make) -> None:
    datamodule = make(augment=StripeAugment())
    for stage in ("train", "val", "test"):
        for batch in _batches(datamodule, stage):
            size = len(batch["index"])
            assert set(batch) == set(datamodule.batch_keys)
            assert batch["image"].shape == (size, 3, 32, 32)
            assert batch["mask"].shape == (size, 1, 32, 32)
            assert batch["position"].shape == (size, 2)
            assert batch["image"].dtype == batch["mask"].dtype == torch.float32
            assert batch["index"].dtype == batch["image_index"].dtype == torch.int64
            assert batch["image"].min() >= 0
            assert batch["image"].max() <= 1
            assert set(batch["mask"].unique().tolist()) <= {0.0, 1.0}
    assert all("mask" not in batch for batch in _batches(datamodule, "predict"))


def test_channels_come_as_stored_and_as_configured(make: Make, tmp_path: Path) -> None:
    root = tmp_path / "rgb"
    root.mkdir()
    blue_green_red = np.full((32, 32, 3), (30, 20, 10), np.uint8)
    for name in "abc":
        cv2.imwrite(str(root / f"{name}.png"), blue_green_red)
    for channels, expected in (((0, 1, 2), [10, 20, 30]), ((2, 0, 1), [30, 10, 20])):
        datamodule = make(root, channels=channels, synthesis=DefectSpec(probability=0.0))
        image = _batches(datamodule, "predict")[0]["image"][0]
        assert (image[:, 0, 0] * 255).round().tolist() == expected


@pytest.mark.parametrize(
    "options",
    [
        {"loader": {"micro_batch_size": 1, "num_workers": 2}},
        {"loader": {"micro_batch_size": 8, "num_workers": 1}},
        {"loader": {"micro_batch_size": 32}},
        *({"cache": cache} for cache in ("device", "lru", "none")),
    ],
    ids=str,
)
def test_samples_do_not_depend_on_the_loader_or_the_cache(
    make: Make, options: dict[str, Any]
) -> None:
    augment = StripeAugment()
    expected = _batches(make(augment=augment), "train", epoch=2)
    found = _batches(make(augment=augment, **options), "train", epoch=2)
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


def test_training_changes_with_epoch_and_seed_and_validation_does_not(make: Make) -> None:
    datamodule = make(augment=StripeAugment())
    assert _digest(_batches(datamodule, "train", 0)) != _digest(_batches(datamodule, "train", 1))
    other = make(augment=StripeAugment(), loader={"seed": 1})
    assert _digest(_batches(datamodule, "train")) != _digest(_batches(other, "train"))
    assert _digest(_batches(datamodule, "val")) == _digest(_batches(datamodule, "val"))


def _write_masked_images(folder: Path) -> tuple[Path, dict[str, list[str]]]:
    """Images in lists for each split; those of the test split have masks, 1 in their first 16 rows."""
    root = write_images(folder)
    names = [path.name for path in sorted(root.glob("*.png"))]
    splits = {"train": names[:6], "val": names[6:8], "test": names[8:]}
    (root / "masks").mkdir()
    for name in splits["test"]:
        mask = np.zeros((80, 70), np.uint8)
        mask[:16] = 255
        cv2.imwrite(str(root / "masks" / name), mask)
    return root, splits


def test_real_masks_replace_synthesis_in_their_split(make: Make, tmp_path: Path) -> None:
    root, splits = _write_masked_images(tmp_path / "images")
    datamodule = make(root, masks="masks", splits=splits)
    for batch in _batches(datamodule, "test"):
        expected = (batch["position"][:, :1] + torch.arange(32) < 16).float()
        assert torch.equal(batch["mask"][:, 0], expected[:, :, None].expand(-1, -1, 32))
    assert len(datamodule.bank) == 10


@pytest.mark.parametrize(
    ("edges", "layout"), [("cover", "channels"), ("drop", "single"), ("pad", "channels")]
)
def test_patches_cut_on_the_device_are_the_same(
    make: Make, tmp_path: Path, edges: str, layout: str
) -> None:
    root, splits = _write_masked_images(tmp_path / "images")
    for path in root.glob("*.png"):
        if layout == "single":
            cv2.imwrite(str(path), cv2.imread(str(path), cv2.IMREAD_GRAYSCALE))
    options = {"masks": "masks", "splits": splits, "edges": edges, "layout": layout}
    options["augment"] = StripeAugment()
    stored, device = (make(root, cache=cache, **options) for cache in ("store", "device"))
    stages = ("train", "val", "test", "predict")
    for stage in stages:
        for one, other in zip(_batches(stored, stage), _batches(device, stage), strict=True):
            assert_equal(one, other)
        one, other = (
            m.plan_batch(next(iter(m.make_loader(stage))), stage) for m in (stored, device)
        )
        assert not {"image", "mask"} & other.keys()
        told, expected = device.inspect(stage), stored.inspect(stage)
        assert told.describe_plan(other, [0, 1]) == expected.describe_plan(one, [0, 1])
        found, wanted = told.annotate(other), expected.annotate(one)
        assert (found is None) == (wanted is None) == (stage in ("test", "predict"))
        assert found is None or wanted is None or torch.equal(found[1].labels, wanted[1].labels)


@pytest.mark.parametrize(
    ("dtype", "edges"), [(np.uint8, "cover"), (np.uint16, "pad"), (np.float32, "cover")]
)
def test_workers_draw_the_same_defects_as_the_device(
    make: Make, tmp_path: Path, dtype: type, edges: str
) -> None:
    root = write_arrays(tmp_path / "images", dtype, (90, 75))
    synthesis = DefectSpec(probability=1.0, count=(20, 30))
    options = {"edges": edges, "augment": StripeAugment(), "synthesis": synthesis}
    workers, device = (make(root, backend=backend, **options) for backend in ("auto", "device"))
    for stage in ("train", "val"):
        for one, other in zip(_batches(workers, stage), _batches(device, stage), strict=True):
            assert one["mask"].any()
            assert_equal(one, other)
    assert (workers.dataset("train").writer is None) == (
        dtype is np.float32 or torch.cuda.is_available()
    )


@pytest.mark.parametrize("backend", ["cpu", "device"])
def test_the_dataset_says_whether_its_batches_are_drawn_into(make: Make, backend: str) -> None:
    datamodule = make(backend=backend)
    batch = next(iter(datamodule.make_loader("train")))
    # A mask among the keys of a batch changes nothing.
    batch["mask"] = torch.zeros(len(batch["index"]), 1, 32, 32)
    assert ("plan" in datamodule.plan_batch(batch, "train")) == (backend == "device")
    assert "plan" not in datamodule.plan_batch(batch, "predict")


def test_images_without_mask_and_masks_without_image_are_listed(make: Make, tmp_path: Path) -> None:
    root = write_images(tmp_path / "images")
    (root / "masks").mkdir()
    cv2.imwrite(str(root / "masks" / "lost.png"), np.zeros((80, 70), np.uint8))
    with pytest.raises(DataError, match=r"lost.png(.|\n)*1 mask has no image in"):
        make(root, masks="masks")
    (root / "masks" / "lost.png").unlink()
    cv2.imwrite(str(root / "masks" / "00.png"), np.zeros((80, 70), np.uint8))
    with pytest.raises(DataError, match="mask"):
        make(root, masks="masks", splits={"train": ["02.png"], "test": ["00.png", "01.png"]})


def test_layout_files_puts_each_file_into_its_channel(make: Make, tmp_path: Path) -> None:
    root = tmp_path / "files"
    root.mkdir()
    for number in range(4):
        for role, value in (("a", 1000), ("b", 2000), ("c", 4000)):
            cv2.imwrite(str(root / f"{number}_{role}.png"), np.full((32, 32), value, np.uint16))
    pairs = {"target": "*_a.png", "ref1": "*_b.png"}
    for layout, files, values in (
        ("files", pairs | {"ref2": "*_c.png"}, [0.25, 0.5, 1.0]),
        ("pairs", pairs, [0.25, 0.5, 0.5]),
    ):
        datamodule = make(root, layout=layout, files=files, value_range=(0, 4000), synthesis=None)
        assert _batches(datamodule, "predict")[0]["image"][0, :, 0, 0].tolist() == values


def test_layout_single_makes_three_exposures_of_one_texture(make: Make, tmp_path: Path) -> None:
    root = write_grey(tmp_path / "grey")
    three = cv2.merge([cv2.imread(str(root / "1.png"), cv2.IMREAD_GRAYSCALE)] * 3)
    cv2.imwrite(str(root / "1.png"), three)
    with pytest.raises(DataError, match="needs 3 channels"):
        make(root)
    datamodule = make(root, layout="single", nuisance=SingleTexture(shift_px=0, gain=0, noise=0.02))
    image = _batches(datamodule, "predict")[0]["image"]
    spread = (image[:, 0] - image[:, 1]).std()
    assert 0.024 < spread < 0.032  # two independent noises of 0.02
    assert datamodule.bank.channels == 1


@pytest.mark.parametrize(
    ("batch_format", "check"),
    [
        (
            ("target", "ref1", "ref2", "mask"),
            lambda out, b: [torch.equal(out[n], b["image"][:, n : n + 1]) for n in range(3)],
        ),
        (
            {"x": "image", "y": "mask"},
            lambda out, b: [set(out) == {"x", "y"}, torch.equal(out["y"], b["mask"])],
        ),
        ("dict", lambda out, b: [set(out) == set(b)]),
    ],
)
def test_existing_modules_get_their_format(
    make: Make, batch_format: Any, check: Callable[..., list[bool]], tmp_path: Path
) -> None:
    seen = []
    datamodule = make(batch_format=batch_format)
    fit(Watcher(seen.append), datamodule, tmp_path, limit_train_batches=1, limit_val_batches=0)
    assert all(check(seen[0], _batches(datamodule, "train")[0]))


def test_callbacks_report_what_was_trained(make: Make, tmp_path: Path) -> None:
    def train(
        seed: int, cache: str = "store", **loader: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        digest, wait = SampleDigest(), DataWaitMonitor(plot=False)
        datamodule = make(augment=StripeAugment(), cache=cache, loader={"seed": seed, **loader})
        options = {"enable_checkpointing": False, "max_epochs": 2}
        fit(Watcher(), datamodule, tmp_path, callbacks=[digest, wait], **options)
        return dict(digest.summary()), wait.summary()

    trained, wait = train(0)
    assert trained["train/samples_hashed"] == 2 * len(make().dataset("train"))
    assert trained == train(0, "device", batch_size=5)[0]
    assert trained == train(0, num_workers=2, micro_batch_size=3)[0]
    assert trained["samples_sha256"] != train(1)[0]["samples_sha256"]
    assert 0 < wait["data_wait_fraction"] < 1
    assert wait["samples_per_s"] > 0


def test_empty_splits(make: Make) -> None:
    datamodule = make(splits={"train": 1.0})
    assert datamodule.val_dataloader() == []
    with pytest.raises(ConfigError, match="the test split holds no images"):
        datamodule.test_dataloader()
    with pytest.raises(ConfigError, match="the train split holds no images"):
        make(splits={"test": 1.0}).train_dataloader()
    undrawn = make(synthesis=None)
    with pytest.raises(ConfigError, match="the train split has neither masks nor synthesis"):
        undrawn.train_dataloader()
    assert len(undrawn.predict_dataloader())
    with pytest.raises(ConfigError, match=r"call transform\(batch, stage\) instead"):
        undrawn.on_before_batch_transfer({}, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "ram"}, "cache='ram' is unknown: choose one of store, device, lru, none"),
        ({"on_bad": "ignore"}, "on_bad='ignore' is unknown: choose one of error, skip"),
        ({"channels": (0, 1)}, r"channels=\[0, 1\] must name three"),
        ({"layout": "triple"}, "layout='triple' is unknown"),
        ({"patch_px": 0}, "patch_px=0 is not usable"),
        ({"edges": "wrap"}, "edges='wrap' is unknown"),
        ({"backend": "gpu"}, "backend='gpu' is unknown: choose one of auto, cpu, device"),
        ({"value_range": (5, 5)}, r"value_range=\[5, 5\] must be \[low, high\]"),
    ],
)
def test_bad_options(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**options)


@pytest.mark.parametrize("backend", ["cpu", "device"])
def test_defects_are_annotated_where_augmentation_moved_them(make: Make, backend: str) -> None:
    for augment in (None, StripeAugment(gain=0, noise=0)):
        synthesis = DefectSpec(probability=1.0, amplitude=(0.3, 0.4))
        datamodule = make(augment=augment, synthesis=synthesis, backend=backend)
        clean = make(augment=augment, synthesis=DefectSpec(probability=0.0))
        planned = datamodule.plan_batch(next(iter(datamodule.make_loader("train"))), "train")
        base = clean.transform(next(iter(clean.make_loader("train"))), "train")
        inspection = datamodule.inspect("train")
        found = inspection.annotate(planned)
        assert found is not None
        defects, annotations = found
        finished = datamodule.finish_batch(planned, "train")
        changed, shown = finished["image"] != base["image"], annotations.labels > 0
        assert (shown | ~changed).all()
        assert changed.sum() > 0.95 * shown.sum()  # a pixel that was 0 or 1 already cannot change
        is_true = torch.cat((torch.zeros(1, dtype=torch.bool), defects.is_true))
        truth = is_true[annotations.labels[:, 0].long()]
        assert (truth <= finished["mask"][:, 0].bool()).all()
        rows = inspection.describe_plan(planned, [0, 2])
        assert {row["index"] for row in rows} == {int(planned["index"][n]) for n in (0, 2)}
        rows = inspection.describe_plan(planned, range(4))
        assert sum(row["is_true"] for row in rows) == int(defects.is_true.sum())


def test_verify_finds_a_changed_source(make: Make, tmp_path: Path) -> None:
    datamodule = make()
    assert datamodule.verify_sources() == []
    assert datamodule.check_sources() == datamodule.describe()
    path = tmp_path / "images" / "03.png"
    path.write_bytes(path.read_bytes()[:-20])
    assert len(datamodule.verify_sources()) == 1
    with pytest.raises(DataError, match=r"03.png(.|\n)*1 of 10 files is bad"):
        datamodule.check_sources()
    with pytest.raises(ConfigError, match="only a store can be verified"):
        make(write_images(tmp_path / "other"), cache="lru").verify_sources()


@pytest.fixture(autouse=True)
def _no_tips(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "lightning.pytorch.utilities.rank_zero")


@pytest.mark.parametrize(
    ("cache", "backend"), [("store", "cpu"), ("none", "device"), ("device", "device")]
)
def test_a_margin_shows_real_pixels(make: Make, cache: str, backend: str) -> None:
    """With a shift that crops to the patch, every pixel comes from the image where the patch lies in its middle."""
    augment = Geometry(shift_px=5, crop_px=32)
    nothing = DefectSpec(probability=0.0)
    datamodule = make(augment=augment, synthesis=nothing, cache=cache, backend=backend)
    plain = make(augment=None, synthesis=nothing)
    for batch in datamodule.make_loader("train"):
        assert datamodule.dataset("train").margin_px == (5, 5)
        found = datamodule.transform(batch, "train")
        assert found["image"].shape[2:] == found["mask"].shape[2:] == (32, 32)
        for row, (y, x) in enumerate(found["position"].tolist()):
            stored = plain.bank[int(found["image_index"][row])]
            image = np.pad(stored, ((0, 0), (5, 5), (5, 5)), mode="reflect") / 255
            around = torch.from_numpy(image[:, y : y + 42, x : x + 42].astype(np.float32))
            windows = around.unfold(1, 32, 1).unfold(2, 32, 1)
            assert torch.isclose(windows, found["image"][row][:, None, None]).all((0, 3, 4)).any()
    assert plain.dataset("train").margin_px == datamodule.dataset("val").margin_px == (0, 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_finishing_leaves_the_pixels_of_the_loader_as_they_are(
    make: Make, tmp_path: Path, dtype: type
) -> None:
    """A batch is finished again after an error, and for pictures."""
    root = write_arrays(tmp_path / "images", dtype, (60, 60))
    datamodule = make(root, backend="device", augment=StripeAugment())
    planned = datamodule.plan_batch(next(iter(datamodule.make_loader("train"))), "train")
    before = planned["image"].clone()
    first, second = (datamodule.finish_batch(planned, "train") for _ in range(2))
    assert torch.equal(planned["image"], before)
    assert_equal(first, second)


def test_images_without_references_have_defects_in_all_channels(tmp_path: Path) -> None:
    paths = write_noise(tmp_path / "grey", 6, (48, 40), channels=1)
    synthesis = DefectSpec(probability=1.0, amplitude=(0.3, 0.4))
    data = opened(
        ImageDataModule(
            tmp_path / "grey", patch_px=32, synthesis=synthesis, cache="none", split_seed=1,
            loader=LoaderOptions(batch_size=4, num_workers=0),
        )
    )  # fmt: skip
    assert data.describe()["train_patches"] == 4 * 4
    planned = data.plan_batch(next(iter(data.make_loader("train"))), "train")
    batch = data.finish_batch(planned, "train")
    assert (batch["image"].shape, batch["mask"].shape) == ((4, 1, 32, 32), (4, 1, 32, 32))
    assert batch["mask"].any()
    visuals = data.inspect("train")
    rows = visuals.describe_plan(planned, range(4))
    assert rows
    assert not {"target", "ref1"} & rows[0].keys()
    assert all(family.after.shape == (4, 32, 32) for family in visuals.preview_families(planned))
    y, x = batch["position"][0].tolist()
    pixels = read_image(paths[int(batch["image_index"][0])])[0, y : y + 32, x : x + 32]
    is_same = np.isclose(batch["image"][0, 0], pixels / 255, atol=1e-6)
    is_defect = batch["mask"][0, 0].bool().numpy()
    assert not is_same[is_defect].any()
    assert is_same[~is_defect].mean() > 0.8  # a defect fades out beyond what counts as one


def test_all_datamodules_take_the_file_options() -> None:
    for name in datamodules.__all__:
        if name == "BaseDataModule" or not name.endswith("DataModule"):
            continue
        arguments = read_arguments(getattr(datamodules, name))
        assert {each.name for each in dataclasses.fields(FileOptions)} <= arguments.hints.keys()
        assert not arguments.takes_any, name
