from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lit_data.commands.session import load_weights
from lit_data.errors import ConfigError, StoreError
from lit_data.modules import CompareNet, SegmentationModule
from lit_data.modules.segmentation import plain_difference

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*")


def _samples(count: int = 8, *, empty: bool = False) -> list[dict[str, torch.Tensor]]:
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


def _trainer(folder: Path, **options: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return L.Trainer(**(defaults | options))


@pytest.mark.parametrize("schedule", ["one_cycle", "cosine", "none"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_it_learns_and_logs_what_it_says(schedule: Any, precision: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = SegmentationModule(schedule=schedule)
    loader = DataLoader(_samples(32), batch_size=4)  # type: ignore[arg-type]
    trainer = _trainer(tmp_path, max_epochs=6, precision=precision, enable_checkpointing=False)
    trainer.fit(model, loader, loader)
    names = [
        f"{name}{suffix}" for name in ("average_precision", "dice", "defect_recall") for suffix in ("", "_baseline")
    ]
    assert set(trainer.callback_metrics) == {"train/loss", *(f"val/{name}" for name in names)}
    assert trainer.callback_metrics["val/average_precision"] > 0.9
    tested = trainer.test(model, loader, verbose=False)[0]
    assert set(tested) == {f"test/{name}" for name in names}
    assert tested["test/defect_recall"] == 1.0


def test_masks_may_all_be_empty(tmp_path: Path) -> None:
    loader = DataLoader(_samples(4, empty=True), batch_size=2)  # type: ignore[arg-type]
    trainer = _trainer(tmp_path, enable_checkpointing=False)
    trainer.fit(SegmentationModule(), loader, loader)
    assert trainer.callback_metrics["val/average_precision"] == 0
    assert torch.isfinite(trainer.callback_metrics["train/loss"])


def test_predictions_carry_their_place(tmp_path: Path) -> None:
    loader = DataLoader(_samples(4), batch_size=4)  # type: ignore[arg-type]
    predicted: Any = _trainer(tmp_path).predict(SegmentationModule(), loader)
    assert set(predicted[0]) == {"probability", "index", "image_index", "position"}
    assert predicted[0]["probability"].shape == (4, 1, 32, 32)
    assert predicted[0]["probability"].min() >= 0
    assert predicted[0]["probability"].max() <= 1


def test_checkpoints_hold_plain_data(tmp_path: Path) -> None:
    loader = DataLoader(_samples(4), batch_size=4)  # type: ignore[arg-type]
    model, trainer = SegmentationModule(), _trainer(tmp_path, enable_checkpointing=False)
    trainer.fit(model, loader, loader)
    path = tmp_path / "a.ckpt"
    trainer.save_checkpoint(path)
    other = SegmentationModule()
    load_weights(other, path)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["hyper_parameters"] == {"num_parameters": 5393}
    loaded = SegmentationModule.load_from_checkpoint(path, weights_only=True, strict=True)
    assert torch.equal(next(loaded.parameters()), next(model.parameters()))


def test_foreign_files_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "text.ckpt").write_text("not a checkpoint")
    torch.save({"weights": 1}, tmp_path / "other.ckpt")
    wide = SegmentationModule(CompareNet(width=8))
    torch.save({"state_dict": wide.state_dict()}, tmp_path / "wide.ckpt")
    for name in ("text", "other", "wide"):
        with pytest.raises(StoreError, match=rf"{name}.ckpt does not hold weights of SegmentationModule"):
            load_weights(SegmentationModule(), tmp_path / f"{name}.ckpt")


def test_the_baseline_is_the_plain_difference() -> None:
    images = torch.tensor([0.9, 0.2, 0.4]).view(1, 3, 1, 1)
    assert float(plain_difference(images)) == pytest.approx(0.6)


def test_unknown_schedule() -> None:
    with pytest.raises(ConfigError, match="schedule='linear' is unknown: choose one of one_cycle, cosine, none"):
        SegmentationModule(schedule="linear")  # type: ignore[arg-type]
