"""`AnomalyModule` and its encoder: tiles, calibration, checkpoints, and files and nets that do not fit."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_data.errors import ConfigError, DataError, StoreError
from lit_data.modules import AnomalyModule, TextureEncoder
from lit_data.testing import QUIET


def _draw(
    count: int, *, seed: int = 0, defects: bool = False, channels: int = 3
) -> list[dict[str, Tensor]]:
    """Samples of fine stripes; those with defects have a flat square."""
    rng, samples = np.random.default_rng(seed), []
    for number in range(count):
        x = np.arange(64) + rng.uniform(0, 8)
        image = np.tile(0.5 + 0.2 * np.sin(x), (channels, 64, 1)) + rng.normal(
            0, 0.02, (channels, 64, 64)
        )
        mask = np.zeros((1, 64, 64), np.float32)
        if defects and number % 2:
            image[:, 20:40, 16:36], mask[:, 20:40, 16:36] = 0.5, 1
        numbers = {"image_index": torch.tensor(number)}
        samples.append(
            {"image": torch.from_numpy(image).float(), "mask": torch.from_numpy(mask), **numbers}
        )
    return samples


def _load(samples: Any) -> DataLoader[Any]:
    return DataLoader(samples, batch_size=4)


def _fit(
    tmp_path: Path, net: nn.Module | None = None, channels: int = 3, **options: Any
) -> AnomalyModule:
    model = AnomalyModule(net, **{"bank_size": 60, "candidates": 400, **options})
    trainer = L.Trainer(
        **{**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0, "default_root_dir": str(tmp_path)}
    )
    trainer.fit(
        model, _load(_draw(8, channels=channels)), _load(_draw(4, seed=1, channels=channels))
    )
    return model


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_what_good_images_do_not_show_is_above_one_half(tmp_path: Path) -> None:
    model = _fit(tmp_path)
    assert model.bank.shape == (60, 96)
    assert not any(weight.requires_grad for weight in model.net.parameters())
    images = torch.stack([sample["image"] for sample in _draw(4, seed=2, defects=True)])
    with torch.no_grad():
        probability = model.predict_step({"image": images}, 0)["probability"]
    assert probability.shape == (4, 1, 64, 64)
    highest = probability.flatten(1).amax(1)
    assert (highest[1::2] > 0.6).all()
    assert (highest[::2] < 0.6).all()
    y, x = divmod(int(probability[1, 0].argmax()), 64)
    assert 14 <= y < 46
    assert 10 <= x < 42


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_the_highest_score_of_good_validation_images_is_just_below_one_half(tmp_path: Path) -> None:
    model = _fit(tmp_path, margin=0.1)
    images = torch.stack([sample["image"] for sample in _draw(4, seed=1)])
    with torch.no_grad():
        distance = model(images).max()
        probability = model.predict_step({"image": images}, 0)["probability"].max()
    assert float(model.threshold) == pytest.approx(1.1 * float(distance), rel=1e-4)
    assert float(probability) == pytest.approx(1 / (1 + 1.1**4), rel=1e-3)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_scores_are_those_of_images_and_pixels(tmp_path: Path) -> None:
    model = _fit(tmp_path)
    trainer = L.Trainer(**{**QUIET, "default_root_dir": str(tmp_path)})
    (found,) = trainer.test(model, _load(_draw(8, seed=2, defects=True)), verbose=False)
    assert found["test/image_auroc"] == 1
    assert found["test/misses"] == 0
    assert found["test/pixel_auroc"] > 0.9
    good, bad = model.confusion["test"].counts
    assert good[1] / max(sum(good), 1) == pytest.approx(found["test/false_alarms"])
    assert bad[0] == 0 < bad[1]
    (found,) = trainer.test(model, _load(_draw(8, seed=2)), verbose=False)
    assert found.keys() == {"test/false_alarms"}


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_a_tile_is_scored_as_the_whole_image(tmp_path: Path) -> None:
    model = _fit(tmp_path)
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 3, 413, 390, generator=generator)
    with torch.no_grad():
        whole, tile = model(image), model(image[:, :, 64:384, 32:352])
        corner = model(image[:, :, 128:, 160:])
    torch.testing.assert_close(
        tile[..., 128:-128, 128:-128], whole[..., 192:256, 160:224], atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(
        corner[..., 128:, 128:], whole[..., 256:, 288:], atol=1e-4, rtol=1e-4
    )


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_a_checkpoint_holds_all_and_nothing_but_data(tmp_path: Path) -> None:
    model, path = _fit(tmp_path), tmp_path / "model.ckpt"
    model.trainer.save_checkpoint(path)
    found = torch.load(path, weights_only=True)
    assert "candidates" not in found
    fresh = AnomalyModule(None, bank_size=60, candidates=400)
    fresh.load_state_dict(found["state_dict"])
    image = torch.rand(1, 3, 40, 56)
    with torch.no_grad():
        torch.testing.assert_close(fresh.eval()(image), model.eval()(image))
    assert path.stat().st_size < 2**20


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.parametrize("sides", [(1, 1), (3, 50), (17, 9)])
def test_images_of_any_size_are_scored(sides: tuple[int, int], tmp_path: Path) -> None:
    model = _fit(tmp_path, channels=1)
    with torch.no_grad():
        found = model(torch.rand(2, 1, *sides))
    assert found.shape == (2, 1, *sides)
    assert found.isfinite().all()


def test_defects_do_not_train(tmp_path: Path) -> None:
    trainer = L.Trainer(**{**QUIET, "max_epochs": 1, "default_root_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"data\.train_on=good"):
        AnomalyModule().training_step(_draw(2, defects=True)[1] | {}, 0)
    with pytest.raises(ConfigError, match="no memory bank yet"):
        trainer.test(AnomalyModule(), _load(_draw(2)), verbose=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bank_size": 0}, "bank_size=0"),
        ({"bank_size": 10, "candidates": 9}, "bank_size=10, candidates=9"),
        ({"quantile": 1.5}, "quantile"),
        ({"margin": -1.0}, "margin=-1.0"),
        ({"smooth_px": float("nan")}, "smooth_px=nan"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AnomalyModule(TextureEncoder(None), **options)


class _Plain(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images


class _Own(nn.Module):
    """An encoder of a user: strides of 2 and 16 px."""

    stride_px = 16

    def forward(self, images: Tensor) -> list[Tensor]:
        return [nn.functional.avg_pool2d(images, 2), nn.functional.avg_pool2d(images, 16)]


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_any_net_that_gives_maps_is_an_encoder(tmp_path: Path) -> None:
    model = _fit(tmp_path, _Own())
    assert model.bank.shape == (60, 6)
    assert model(torch.rand(1, 3, 50, 70)).shape == (1, 1, 50, 70)
    with pytest.raises(ConfigError, match=r"_Plain gives .* must give a list of feature maps"):
        AnomalyModule(_Plain()).find_features(torch.rand(1, 3, 32, 32))
    model.net = TextureEncoder(None)
    with pytest.raises(ConfigError, match="gives 96 features and the memory bank has 6"):
        model(torch.rand(1, 3, 32, 32))


class _Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("trap").touch, ())


def test_a_file_of_weights_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = TextureEncoder().state_dict()
    torch.save({"state_dict": good}, "good.pt")
    assert torch.equal(TextureEncoder("good.pt").fine.plain.weight, good["fine.plain.weight"])
    torch.save(_Trap(), "trap.pt")
    torch.save({name: value for name, value in good.items() if name != "fine.mean"}, "less.pt")
    torch.save({**good, "fine.plain.bias": torch.full((48,), torch.nan)}, "nan.pt")
    torch.save([1, 2], "list.pt")
    Path("half.pt").write_bytes(Path("good.pt").read_bytes()[:5000])
    Path("empty.pt").touch()
    for name, message in {
        "trap.pt": "more than data",
        "less.pt": "does not hold all weights of TextureEncoder: fine.mean lack",
        "nan.pt": "NaN",
        "list.pt": "is no checkpoint",
        "half.pt": "is no checkpoint that can be read",
        "empty.pt": "is no checkpoint that can be read",
    }.items():
        with pytest.raises(StoreError, match=message):
            TextureEncoder(name)
    with pytest.raises(DataError, match=r"none\.pt is not a file"):
        TextureEncoder("none.pt")
    assert not Path("trap").exists()
    with pytest.raises(StoreError, match="does not hold all weights"):
        TextureEncoder("good.pt", width=20)
