from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, Timer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lit_data.app.checkpoints import load_weights
from lit_data.core.errors import ConfigError, StoreError
from lit_data.models import CompareNet, SegmentationModule
from lit_data.models.schedule import learning_rate_factor
from lit_data.models.segmentation.module import plain_difference
from lit_data.wings.volumes import VolumeSegmentationModule
from tests.models.runs import assert_plain_checkpoint, make_trainer


def _samples(count: int = 8, *, empty: bool = False) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(count):
        image = 0.5 + 0.02 * torch.randn(3, 32, 32, generator=generator)
        mask = torch.zeros(1, 32, 32)
        if not empty:
            y, x = torch.randint(4, 28, (2,), generator=generator).tolist()
            image[0, y - 1 : y + 2, x - 1 : x + 2] += 0.3
            mask[0, y - 1 : y + 2, x - 1 : x + 2] = 1
        places = {"image_index": torch.tensor(0), "position": torch.tensor([0, 0])}
        samples.append({"image": image, "mask": mask, "index": torch.tensor(number), **places})
    return samples


@pytest.mark.parametrize(
    ("schedule", "precision"),
    [("one_cycle", "32-true"), ("cosine", "bf16-mixed")],
)
def test_it_learns_and_logs_what_it_says(schedule: Any, precision: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = SegmentationModule(CompareNet(), schedule=schedule)
    loader = DataLoader(_samples(32), batch_size=4)  # type: ignore[arg-type]
    trainer = make_trainer(tmp_path, max_epochs=6, precision=precision)
    trainer.fit(model, loader, loader)
    names = ["average_precision", "dice", "defect_recall"]
    names += [f"{name}_baseline" for name in names]
    losses = {"train/loss", "val/loss"}
    assert set(trainer.callback_metrics) == losses | {f"val/{name}" for name in names}
    assert trainer.callback_metrics["val/average_precision"] > 0.9
    tested = trainer.test(model, loader, verbose=False)[0]
    assert set(tested) == {f"test/{name}" for name in names}
    assert tested["test/defect_recall"] == 1.0


def test_the_loss_of_a_validation_is_its_mean_and_costs_no_second_pass(tmp_path: Path) -> None:
    samples = _samples(5)
    model = SegmentationModule(CompareNet(), baseline=False)
    passes = []
    model.net.register_forward_hook(lambda net, images, answers: passes.append(len(answers)))
    loader = DataLoader(samples, batch_size=4)  # type: ignore[arg-type]
    trainer = make_trainer(tmp_path, num_sanity_val_steps=0)
    trainer.fit(model, loader, loader)
    assert passes == [4, 1, 4, 1]
    model.eval()
    with torch.no_grad():
        losses = [model.find_loss(batch) for batch in loader]
    expected = (4 * losses[0] + losses[1]) / 5
    torch.testing.assert_close(trainer.callback_metrics["val/loss"], expected)
    scored = trainer.validate(model, loader, verbose=False)[0]
    assert "val/loss" not in scored  # it is a curve of the training


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
@pytest.mark.parametrize("anomaly_metrics", [False, True])
def test_weights_of_any_dtype_train_and_are_scored(
    precision: Any, anomaly_metrics: bool, tmp_path: Path
) -> None:
    loader = DataLoader(_samples(8), batch_size=4)  # type: ignore[arg-type]
    model = SegmentationModule(CompareNet(), anomaly_metrics=anomaly_metrics)
    trainer = make_trainer(tmp_path, precision=precision)
    trainer.fit(model, loader, loader)
    assert 0 <= trainer.callback_metrics["val/average_precision"] <= 1
    assert trainer.predict(model, loader)[0]["probability"].dtype == torch.float32


UNDEFINED = ("val/average_precision", "val/dice", "val/defect_recall", "val/dice_baseline")


def test_masks_may_all_be_empty(tmp_path: Path) -> None:
    loader = DataLoader(_samples(4, empty=True), batch_size=2)  # type: ignore[arg-type]
    trainer = make_trainer(tmp_path)
    trainer.fit(SegmentationModule(CompareNet()), loader, loader)
    assert all(trainer.callback_metrics[name].isnan() for name in UNDEFINED)
    assert torch.isfinite(trainer.callback_metrics["train/loss"])


def test_scores_that_do_not_apply_are_left_out(tmp_path: Path) -> None:
    loader = DataLoader(_samples(4), batch_size=4)  # type: ignore[arg-type]
    trainer = make_trainer(tmp_path)
    trainer.fit(
        SegmentationModule(CompareNet(), loss="mean", false_alarms_per_patch=None, baseline=False),
        loader,
        loader,
    )
    named = {"average_precision", "dice", "loss"}
    assert set(trainer.callback_metrics) == {"train/loss", *(f"val/{name}" for name in named)}
    with pytest.raises(ConfigError, match="loss='median' is unknown: choose one of rare, mean"):
        SegmentationModule(CompareNet(), loss="median")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"image_score_fraction=1.5 must be between 0 and 1"):
        SegmentationModule(CompareNet(), image_score_fraction=1.5)
    images = torch.tensor([0.9, 0.2, 0.4]).view(1, 3, 1, 1)
    assert float(plain_difference(images)) == pytest.approx(0.6)  # the baseline


def test_checkpoints_hold_plain_data(tmp_path: Path) -> None:
    loader = DataLoader(_samples(4), batch_size=4)  # type: ignore[arg-type]
    model = SegmentationModule(
        CompareNet(), schedule="cosine", dice_weight=0.5, false_alarms_per_patch=0.2
    )
    trainer, path = make_trainer(tmp_path), tmp_path / "a.ckpt"
    trainer.fit(model, loader, loader)
    plain = {"schedule": "cosine", "loss": "rare", "dice_weight": 0.5}
    plain |= {"false_alarms_per_patch": 0.2, "baseline": True, "focal_gamma": 0.0}
    plain |= {"tversky": (0.5, 0.5), "class_weights": None, "classes": None}
    plain |= {"anomaly_metrics": False, "image_score_fraction": 0.0005, "num_parameters": 5393}
    plain |= {"quantile": None, "margin": 0.05}
    assert_plain_checkpoint(model, SegmentationModule(CompareNet()), trainer, path, plain)
    loaded = SegmentationModule.load_from_checkpoint(
        path, net=CompareNet(), weights_only=True, strict=True
    )
    assert torch.equal(next(loaded.parameters()), next(model.parameters()))
    assert (loaded.schedule, loaded.loss.dice_weight) == ("cosine", 0.5)


@pytest.mark.parametrize("averaged", [False, True])
def test_checkpoints_hold_the_thresholds_that_validation_chose(
    tmp_path: Path, averaged: bool
) -> None:
    samples = _samples(8)
    for number, sample in enumerate(samples):
        sample["image_index"] = torch.tensor(number)
    samples[0]["mask"] = torch.zeros_like(samples[0]["mask"])
    loader = DataLoader(samples, batch_size=4)  # type: ignore[arg-type]
    callbacks = [ModelCheckpoint(tmp_path, filename="last")]
    if averaged:  # buffers are averaged too
        callbacks.append(EMAWeightAveraging(decay=0.9))
    trainer = make_trainer(tmp_path, callbacks=callbacks, enable_checkpointing=True)
    model = SegmentationModule(CompareNet(), anomaly_metrics=True, image_score_fraction=0.01)
    trainer.fit(model, loader, loader)
    names = ("f1_max_threshold", "image_f1_max_threshold")
    chosen = [float(trainer.callback_metrics[f"val/{name}"]) for name in names]
    assert chosen[0] != 0.5
    assert 0 < chosen[1] < 1
    path = tmp_path / "last.ckpt"
    loaded = SegmentationModule.load_from_checkpoint(
        path, net=CompareNet(), weights_only=True, strict=True
    )
    assert sum(map(sum, model.confusion["val"].counts)) == len(samples)
    assert [float(loaded.predict_threshold), float(loaded.image_threshold)] == chosen
    assert float(loaded.image_threshold_fraction) == pytest.approx(0.01)
    trainer.test(model, DataLoader(samples[:2], batch_size=4), verbose=False)  # type: ignore[arg-type]
    assert averaged or [float(model.predict_threshold), float(model.image_threshold)] == chosen


@pytest.mark.parametrize(("quantile", "margin"), [(1.0, 0.0), (0.5, 0.2)])
def test_thresholds_lie_above_a_fraction_of_the_good_images(
    tmp_path: Path, quantile: float, margin: float
) -> None:
    samples = [
        sample | {"image_index": torch.tensor(row)} for row, sample in enumerate(_samples(8))
    ]
    for sample in samples[:5]:
        sample["mask"] = torch.zeros_like(sample["mask"])
    options = {"anomaly_metrics": True, "image_score_fraction": 0.1}
    model = SegmentationModule(CompareNet(), **options, quantile=quantile, margin=margin)
    trainer = make_trainer(tmp_path)
    trainer.validate(model, DataLoader(samples[:5], batch_size=4), verbose=False)  # type: ignore[arg-type]
    images = torch.stack([sample["image"] for sample in samples[:5]])
    ranked = model(images).detach().sigmoid().flatten(1).sort(descending=True).values.double()
    count = round(0.1 * ranked.shape[1])
    for chosen, scores in (
        (model.predict_threshold, ranked[:, 0]),
        (model.image_threshold, ranked[:, :count].mean(1)),
    ):
        odds = scores.quantile(quantile).logit().exp() * (1 + margin)
        assert float(chosen) == pytest.approx(float(odds / (1 + odds)), rel=1e-5)
    assert float(model.image_threshold_fraction) == pytest.approx(0.1)
    # Where no image is good they are those of the best F1.
    trainer.validate(model, DataLoader(samples[5:], batch_size=4), verbose=False)  # type: ignore[arg-type]
    chosen_f1 = float(trainer.callback_metrics["val/f1_max_threshold"])
    assert float(model.predict_threshold) == chosen_f1


def test_a_quantile_that_chooses_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="set anomaly_metrics=true"):
        SegmentationModule(CompareNet(), quantile=1.0)
    with pytest.raises(ConfigError, match="quantile=0 must be a fraction"):
        SegmentationModule(CompareNet(), quantile=0, anomaly_metrics=True)
    with pytest.raises(ConfigError, match="margin=-1: give a finite number"):
        SegmentationModule(CompareNet(), margin=-1)


class _Painter(torch.nn.Module):
    """Logits for three classes from the brightness of the first channel."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(50.0))

    def forward(self, images: Tensor) -> Tensor:
        levels = torch.tensor([0.1, 0.5, 0.9]).view(1, 3, 1, 1)
        return -self.scale * (images[:, :1] - levels).abs()


def _class_samples() -> list[dict[str, Tensor]]:
    mask = torch.zeros(1, 16, 16)
    mask[:, :4, :4], mask[:, 8:, 8:], mask[:, 15] = 1, 2, 255
    image = torch.tensor([0.1, 0.5, 0.9])[mask.long().clamp(max=2)].expand(3, -1, -1).clone()
    image[:, :4, 0] = 0.9  # 4 of 16 pixels of class 1 look like class 2
    return [{"image": image, "mask": mask, "image_index": torch.tensor(0)}]


def test_classes_have_scores_of_their_own(tmp_path: Path) -> None:
    loader = DataLoader(_class_samples(), batch_size=1)  # type: ignore[arg-type]
    model = SegmentationModule(
        _Painter(), classes=["dent", "spot"], baseline=False, false_alarms_per_patch=None
    )
    found = make_trainer(tmp_path).test(model, loader, verbose=False)[0]
    assert found["test/iou_dent"] == pytest.approx(12 / 16)
    assert found["test/iou_spot"] == pytest.approx(56 / 60)
    assert found["test/dice_spot"] == pytest.approx(2 * 56 / (56 + 60))
    assert found["test/mean_iou"] == pytest.approx((12 / 16 + 56 / 60) / 2)
    assert found["test/dice"] == 1  # a defect is a defect
    predicted = make_trainer(tmp_path).predict(model, loader)
    assert predicted[0]["classes"].shape == (1, 2, 16, 16)
    total = predicted[0]["classes"].sum(1, keepdim=True)
    torch.testing.assert_close(total, predicted[0]["probability"], atol=1e-6, rtol=0)


def test_a_net_or_datamodule_with_other_classes_is_refused(tmp_path: Path) -> None:
    loader = DataLoader(_class_samples(), batch_size=1)  # type: ignore[arg-type]

    class Data(LightningDataModule):
        classes = ("x",)

        def test_dataloader(self) -> Any:
            return loader

    three, one = (
        SegmentationModule(_Painter(), classes=["a", "b", "c"]),
        SegmentationModule(CompareNet()),
    )
    for model, data, match in (
        (three, loader, r"4 logits .*background and a, b, c: set model.net.classes=4"),
        (SegmentationModule(_Painter()), loader, "1 logits for each pixel are needed"),
        (one, Data(), r"has the classes \['x'\] and the model none: set model.classes"),
    ):
        with pytest.raises(ConfigError, match=match):
            make_trainer(tmp_path).test(model, data, verbose=False)


def test_a_loss_of_another_library_gets_what_it_takes(tmp_path: Path) -> None:
    loader = DataLoader(_class_samples(), batch_size=1)  # type: ignore[arg-type]
    loss = torch.nn.CrossEntropyLoss(ignore_index=255)
    model = SegmentationModule(
        _Painter(), classes=["dent", "spot"], loss=loss, schedule="none", baseline=False
    )
    trainer = make_trainer(tmp_path)
    trainer.fit(model, loader, loader)
    sample = _class_samples()[0]
    expected = loss(_Painter()(sample["image"][None]), sample["mask"].long()).detach()
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(float(expected))


def test_balanced_weights_come_from_the_counts_of_the_datamodule(tmp_path: Path) -> None:
    loader = DataLoader(_class_samples(), batch_size=1)  # type: ignore[arg-type]

    class Data(LightningDataModule):
        classes = ("dent", "spot")

        def count_classes(self, split: str) -> Any:
            assert split == "train"
            return torch.tensor([[60, 30, 0], [30, 0, 0]]).numpy()

        def train_dataloader(self) -> Any:
            return loader

        val_dataloader = train_dataloader

    model = SegmentationModule(
        _Painter(), classes=["dent", "spot"], class_weights="balanced", schedule="none"
    )
    make_trainer(tmp_path, max_steps=1).fit(model, Data())
    assert model.loss.class_weights.tolist() == pytest.approx([120 / 3 / 90, 120 / 3 / 30, 120 / 3])  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="class_weights=balanced needs a datamodule that counts"):
        make_trainer(tmp_path).fit(model, loader, loader)


def test_class_weights_are_one_for_the_background_and_each_class() -> None:
    with pytest.raises(ConfigError, match="at least 0 for each of background, dent, spot"):
        SegmentationModule(_Painter(), classes=["dent", "spot"], class_weights=[1.0, 2.0])
    with pytest.raises(ConfigError, match=r"class_weights='balance'.* balanced"):
        SegmentationModule(_Painter(), class_weights="balance")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 0 for each of background, defect"):
        SegmentationModule(_Painter(), class_weights=[1.0, 2.0, 3.0])
    with pytest.raises(ConfigError, match="at least 0 for each of background, bone"):
        VolumeSegmentationModule(_Painter(), classes=["bone"], class_weights=[1.0, -1.0])


def test_foreign_files_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    torch.save({"weights": 1}, tmp_path / "other.ckpt")
    wide = SegmentationModule(CompareNet(width=8))
    torch.save({"state_dict": wide.state_dict()}, tmp_path / "wide.ckpt")
    for name, reason in (
        ("text", "is not a readable checkpoint: it is damaged, or holds more than data"),
        ("other", "does not hold weights of Seg"),
        ("wide", "does not hold weights of Seg"),
    ):
        with pytest.raises(StoreError, match=f"{name}.ckpt {reason}"):
            load_weights(SegmentationModule(CompareNet()), tmp_path / f"{name}.ckpt")


@pytest.mark.parametrize(
    ("schedule", "progress", "factor"),
    [
        ("none", 0.7, 1.0),
        ("cosine", 0.0, 1.0),
        ("cosine", 0.5, 0.5),
        ("one_cycle", 0.0, 0.0),
        ("one_cycle", 0.15, 0.5),
        ("one_cycle", 0.3, 1.0),
        ("one_cycle", 0.65, 0.5),
        ("warmup_cosine", 0.025, 0.5),
        ("warmup_cosine", 0.05, 1.0),
        ("warmup_cosine", 0.525, 0.5),
        ("steps", 0.49, 1.0),
        ("steps", 0.5, 0.1),
        ("steps", 0.75, 0.01),
        # a run that is longer than planned
        ("steps", 1.5, 0.01),
        ("cosine", 1.5, 0.0),
        ("one_cycle", 1.5, 0.0),
    ],
)
def test_learning_rate(schedule: Any, progress: float, factor: float) -> None:
    assert learning_rate_factor(schedule, progress) == pytest.approx(factor, abs=1e-12)


class Rates(Callback):
    """The learning rate of each batch."""

    def __init__(self) -> None:
        self.seen = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


class _Stream(IterableDataset[dict[str, Tensor]]):
    """Samples whose number nobody knows, as with a batch size that changes."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(_samples(4))


@pytest.mark.parametrize(
    ("limits", "progress"),
    [
        ({"max_epochs": 2}, [0.25, 0.25, 0.75, 0.75]),  # the rate changes with the epoch
        ({"max_steps": 4}, [0.125, 0.375, 0.625, 0.875]),
    ],
)
def test_loaders_without_a_length(
    limits: dict[str, int], progress: list[float], tmp_path: Path
) -> None:
    watch = Rates()
    torch.manual_seed(0)  # with such a rate some weights diverge, whatever ran before
    model = SegmentationModule(
        CompareNet(), schedule="cosine", optimizer=partial(torch.optim.SGD, lr=1.0)
    )
    trainer = make_trainer(tmp_path, callbacks=[watch], **({"max_epochs": 9} | limits))
    loader = DataLoader(_Stream(), batch_size=2)
    trainer.fit(model, loader, loader)
    assert watch.seen == pytest.approx([learning_rate_factor("cosine", part) for part in progress])


class _StepClock(Timer):
    """A time limit by a clock on which each step takes a second."""

    seconds = 0.0

    def time_elapsed(self, stage: str = "train") -> float:
        return self.seconds

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self.seconds += 1
        super().on_train_batch_end(trainer, *args, **kwargs)


@pytest.mark.parametrize(
    ("max_epochs", "progress"),
    [
        # The rate of a step is set before the clock counts the step ahead of it.
        # The clock ends it; nothing else would; its steps end first.
        (100, [0.5 / 200, 1.5 / 200, 1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8]),
        (-1, [0, 0, 1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8]),
        (2, [1 / 8, 3 / 8, 5 / 8, 7 / 8]),
    ],
)
def test_the_rate_follows_the_clock_where_that_ends_the_run(
    max_epochs: int, progress: list[float], tmp_path: Path
) -> None:
    watch = Rates()
    model = SegmentationModule(
        CompareNet(), schedule="cosine", optimizer=partial(torch.optim.SGD, lr=1e-3)
    )
    clock = _StepClock({"seconds": 8})
    loader = DataLoader(_samples(4), batch_size=2)  # type: ignore[arg-type]
    trainer = make_trainer(tmp_path, callbacks=[watch, clock], max_epochs=max_epochs)
    trainer.fit(model, loader, loader)
    assert watch.seen == pytest.approx(
        [1e-3 * learning_rate_factor("cosine", part) for part in progress]
    )


@pytest.mark.parametrize("has_defects", [True, False], ids=["stays at 0", "undefined"])
def test_the_rate_falls_where_the_metric_of_the_best_checkpoint_stays(
    has_defects: bool, tmp_path: Path
) -> None:
    watch = Rates()
    model = SegmentationModule(
        CompareNet(), schedule="plateau", optimizer=partial(torch.optim.SGD, lr=1e-4)
    )
    best = ModelCheckpoint(tmp_path, monitor="val/dice", mode="max")
    loader = DataLoader(_samples(4, empty=not has_defects), batch_size=4)  # type: ignore[arg-type]
    make_trainer(tmp_path, max_epochs=9, callbacks=[best, watch], enable_checkpointing=True).fit(
        model, loader, loader
    )
    falling = [1e-4] * 7 + [1e-5] * 2
    assert watch.seen == pytest.approx(falling if has_defects else [1e-4] * 9)


@pytest.mark.parametrize(
    ("schedule", "epochs", "message"),
    [
        ("plateau", 1, r"set callbacks\.checkpoint\.monitor"),
        ("one_cycle", -1, "schedule='one_cycle' needs the length of the run: set trainer.max_ep"),
        ("linear", 1, "schedule='linear' is unknown: choose one of one_cycle, cosine, warmup_cos"),
    ],
)
def test_schedules_that_know_too_little_are_refused(
    schedule: Any, epochs: int, message: str, tmp_path: Path
) -> None:
    loader = DataLoader(_Stream(), batch_size=2)
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, max_epochs=epochs).fit(
            SegmentationModule(CompareNet(), schedule=schedule), loader, loader
        )


def test_defects_that_no_mask_marks_are_scored_as_images_alone() -> None:
    model = SegmentationModule(CompareNet(), anomaly_metrics=True, baseline=False)
    masks = torch.zeros(4, 1, 16, 16)
    masks[0, 0, 4:8, 4:8] = 1
    masks[3] = 255
    batch = {"image": torch.rand(4, 3, 16, 16), "mask": masks, "image_index": torch.arange(4)}
    model.score(batch, "test")
    marked_alone = model.take_scores("test")
    assert sum(model.confusion["test"].counts[1]) == 1
    model.score(batch | {"unmarked": torch.tensor([False, False, False, True])}, "test")
    scores = model.take_scores("test")
    assert sum(model.confusion["test"].counts[1]) == 2
    for name in ("average_precision", "pixel_auroc", "dice"):
        assert scores[name] == marked_alone[name]
    assert 0 <= scores["defect_recall"] <= 1
