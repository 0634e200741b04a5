"""`AnomalyModule`, its encoder and its memory bank: tiles, calibration, checkpoints, what does not fit."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning import Callback, LightningDataModule, Trainer
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader
from typing_extensions import override

from lit_data.core.errors import ConfigError, DataError, StoreError
from lit_data.models import AnomalyModule, MemoryBank, PlaceGaussians, TextureEncoder
from lit_data.models.anomaly.bank import choose_coreset, find_distances, find_whitening
from lit_data.models.anomaly.normality import Candidates
from tests.models.runs import make_trainer


def _draw(
    count: int, *, seed: int = 0, defects: bool = False, channels: int = 3
) -> list[dict[str, Tensor]]:
    """Samples of fine stripes; those with defects have a flat square."""
    rng, samples = np.random.default_rng(seed), []
    for number in range(count):
        x = np.arange(64) + rng.uniform(0, 8)
        image = np.tile(0.5 + 0.2 * np.sin(x), (channels, 64, 1))
        image += rng.normal(0, 0.02, image.shape)
        mask = np.zeros((1, 64, 64), np.float32)
        if defects and number % 2:
            image[:, 20:40, 16:36], mask[:, 20:40, 16:36] = 0.5, 1
        sample = {"image": torch.from_numpy(image).float(), "mask": torch.from_numpy(mask)}
        samples.append(sample | {"image_index": torch.tensor(number)})
    return samples


def _load(samples: Any) -> DataLoader[Any]:
    return DataLoader(samples, batch_size=4)


def _fit(
    tmp_path: Path, net: nn.Module | None = None, channels: int = 3, **options: Any
) -> AnomalyModule:
    bank = MemoryBank(60, candidates=400, whiten=net is not None)
    model = AnomalyModule(net, **{"normality": bank, **options})
    train, val = _draw(8, channels=channels), _draw(4, seed=1, channels=channels)
    make_trainer(tmp_path, num_sanity_val_steps=0).fit(model, _load(train), _load(val))
    return model


def _bank(model: AnomalyModule) -> Tensor:
    bank = model.normality.bank
    assert isinstance(bank, Tensor)
    return bank


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> AnomalyModule:
    """A module that was trained once; the tests change nothing of it."""
    return _fit(tmp_path_factory.mktemp("anomaly"), quantile=1.0, margin=0.1)


def test_what_good_images_do_not_show_is_above_one_half(model: AnomalyModule) -> None:
    assert _bank(model).shape == (60, 96)
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


def test_the_highest_score_of_good_validation_images_is_just_below_one_half(
    model: AnomalyModule,
) -> None:
    images = torch.stack([sample["image"] for sample in _draw(4, seed=1)])
    with torch.no_grad():
        distance = model(images).max()
        probability = model.predict_step({"image": images}, 0)["probability"].max()
    assert float(model.threshold) == pytest.approx(1.1 * float(distance), rel=1e-4)
    assert float(probability) == pytest.approx(1 / (1 + 1.1**4), rel=1e-3)


def test_scores_are_those_of_images_and_pixels(model: AnomalyModule, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    (found,) = trainer.test(model, _load(_draw(8, seed=2, defects=True)), verbose=False)
    assert found["test/image_auroc"] == 1
    assert found["test/misses"] == 0
    assert found["test/pixel_auroc"] > 0.9
    good, bad = model.confusion["test"].counts
    assert good[1] / max(sum(good), 1) == pytest.approx(found["test/false_alarms"])
    assert bad[0] == 0 < bad[1]
    (found,) = trainer.test(model, _load(_draw(8, seed=2)), verbose=False)
    assert [name for name, score in found.items() if score == score] == ["test/false_alarms"]


def test_a_tile_is_scored_as_the_whole_image(model: AnomalyModule) -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(1, 3, 413, 390, generator=generator)
    with torch.no_grad():
        whole, tile = model(image), model(image[:, :, 64:384, 32:352])
        corner = model(image[:, :, 128:, 160:])
    assert_close(tile[..., 128:-128, 128:-128], whole[..., 192:256, 160:224], atol=1e-4, rtol=1e-4)
    assert_close(corner[..., 128:, 128:], whole[..., 256:, 288:], atol=1e-4, rtol=1e-4)


def test_a_checkpoint_holds_all_and_nothing_but_data(tmp_path: Path) -> None:
    model, path = _fit(tmp_path / "run"), tmp_path / "model.ckpt"
    model.trainer.save_checkpoint(path)
    found = torch.load(path, weights_only=True)
    assert "candidates" not in found
    fresh = AnomalyModule(None, MemoryBank(60, candidates=400, whiten=False))
    fresh.load_state_dict(found["state_dict"])
    image = torch.rand(1, 3, 40, 56)
    with torch.no_grad():
        assert_close(fresh.eval()(image), model.eval()(image))
    assert path.stat().st_size < 2**20


def test_defects_do_not_train(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train_on=good"):
        AnomalyModule().training_step(_draw(2, defects=True)[1], 0)
    with pytest.raises(ConfigError, match="is not trained yet"):
        make_trainer(tmp_path).test(AnomalyModule(), _load(_draw(2)), verbose=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantile": 1.5}, "quantile"),
        ({"margin": -1.0}, "margin=-1.0"),
        ({"smooth_px": float("nan")}, "smooth_px=nan"),
    ],
)
def test_wrong_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AnomalyModule(TextureEncoder(None), **options)


@pytest.mark.parametrize(("size", "candidates"), [(0, 9), (10, 9)])
def test_a_bank_has_as_many_rows_as_it_is_chosen_from(size: int, candidates: int) -> None:
    with pytest.raises(ConfigError, match=f"size={size}, candidates={candidates}"):
        MemoryBank(size, candidates=candidates)


class _Plain(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images


class _Own(nn.Module):
    """An encoder of a user: strides of 2 and 16 px."""

    stride_px = 16

    def forward(self, images: Tensor) -> list[Tensor]:
        return [nn.functional.avg_pool2d(images, 2), nn.functional.avg_pool2d(images, 16)]


def test_any_net_that_gives_maps_is_an_encoder(tmp_path: Path) -> None:
    model = _fit(tmp_path, _Own())
    assert _bank(model).shape == (60, 6)
    assert model(torch.rand(1, 3, 50, 70)).shape == (1, 1, 50, 70)
    with pytest.raises(ConfigError, match=r"_Plain gives .* must give a list of feature maps"):
        AnomalyModule(_Plain()).find_maps(torch.rand(1, 3, 32, 32))
    model.net = TextureEncoder(None)
    with pytest.raises(ConfigError, match="gives 96 features and the memory bank has 6"):
        model(torch.rand(1, 3, 32, 32))


class _Loud(nn.Module):
    """Two features that go together, one of larger numbers."""

    stride_px = 8

    def forward(self, images: Tensor) -> list[Tensor]:
        return [torch.cat([images[:, :1, ::8, ::8], 10 * images[:, :1, ::8, 1::8]], 1)]


def test_no_feature_outweighs_the_others(tmp_path: Path) -> None:
    model = _fit(tmp_path, _Loud(), normality=MemoryBank(400, candidates=400))
    assert_close(torch.cov(_bank(model).T), torch.eye(2), atol=0.1, rtol=0)
    constant = find_whitening(torch.ones(9, 3))  # nothing differs
    assert constant.isfinite().all()


class _Save(Callback):
    """Saves a checkpoint after the second batch."""

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        if rest[-1] == 1:
            trainer.save_checkpoint(Path(trainer.default_root_dir, "second.ckpt"))


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_a_run_that_stopped_within_the_epoch_goes_on_to_the_same_end(tmp_path: Path) -> None:
    def make() -> AnomalyModule:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(3, 6, 8, 8), nn.BatchNorm2d(6))
        return AnomalyModule(_Maps(layers), PlaceGaussians(), smooth_px=0)

    samples = _draw(16)
    unbroken, resumed = make(), make()
    saving = make_trainer(tmp_path, num_sanity_val_steps=0, callbacks=[_Save()])
    saving.fit(unbroken, _load(samples), _load(_draw(4, seed=1)))
    trainer = make_trainer(tmp_path, num_sanity_val_steps=0)
    # A plain loader begins again: what is left of the epoch is given by hand.
    rest = _load(samples[8:] + samples[8:])
    trainer.fit(resumed, rest, _load(_draw(4, seed=1)), ckpt_path=tmp_path / "second.ckpt")
    assert_close(resumed.state_dict(), unbroken.state_dict())


class _Maps(nn.Module):
    """One map of a net."""

    stride_px = 8

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, images: Tensor) -> list[Tensor]:
        return [self.layers(images)]


def test_a_file_of_weights_holds_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good = TextureEncoder().state_dict()
    torch.save({"state_dict": good}, "good.pt")
    assert torch.equal(TextureEncoder("good.pt").fine.plain.weight, good["fine.plain.weight"])
    torch.save({name: value for name, value in good.items() if name != "fine.mean"}, "less.pt")
    with pytest.raises(StoreError, match=r"lacks weights of TextureEncoder: fine\.mean"):
        TextureEncoder("less.pt")
    with pytest.raises(StoreError, match="lacks weights"):
        TextureEncoder("good.pt", width=20)
    with pytest.raises(DataError, match=r"none\.pt: no such file"):
        TextureEncoder("none.pt")


def test_the_sample_is_bounded_and_that_of_one_batch() -> None:
    rows = torch.arange(1000.0)[:, None]
    whole, parts = Candidates(100, seed=3), Candidates(100, seed=3)
    whole.add(rows)
    for part in rows.split(37):
        parts.add(part)
    assert len(whole) == len(parts) == 100
    assert sorted(whole.rows.flatten().tolist()) == sorted(parts.rows.flatten().tolist())
    assert len(whole.rows.unique()) == 100
    assert 350 < float(whole.rows.mean()) < 650


def test_the_coreset_is_that_of_one_farthest_row_after_the_other() -> None:
    rows = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0)).double()
    chosen = choose_coreset(rows, 700)
    nearest = torch.full((2000,), torch.inf, dtype=torch.float64)
    for number in chosen:
        assert nearest[number] == nearest.max()
        nearest = torch.minimum(nearest, torch.cdist(rows, rows[number : number + 1])[:, 0])


@pytest.mark.parametrize("chunk_bytes", [4, 4 * 70 * 3, 2**26])
def test_distances_are_those_of_all_pairs_in_any_chunks(chunk_bytes: int) -> None:
    generator = torch.Generator().manual_seed(1)
    rows, bank = torch.randn(20, 5, generator=generator), torch.randn(70, 5, generator=generator)
    expected = torch.cdist(rows, bank).amin(1)
    assert_close(
        find_distances(rows, bank, chunk_bytes=chunk_bytes), expected, atol=1e-4, rtol=1e-4
    )


class _Seen(PlaceGaussians):
    """Remembers of how many images it was fitted."""

    counts: ClassVar[list[int]] = []

    @override
    def fit(self) -> None:
        self.counts.append(len(self.candidates))
        super().fit()


def test_an_epoch_that_is_validated_twice_is_learned_whole(tmp_path: Path) -> None:
    model = AnomalyModule(_Own(), _Seen(), smooth_px=0)
    trainer = make_trainer(
        tmp_path, num_sanity_val_steps=0, val_check_interval=0.5, max_epochs=2, max_steps=-1
    )
    trainer.fit(model, _load(_draw(16)), _load(_draw(4, seed=1)))
    assert _Seen.counts == [8, 16, 8, 16]
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert "candidates" not in torch.load(tmp_path / "last.ckpt", weights_only=True)


def test_weights_of_another_dtype_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, precision="bf16-true")
    with pytest.raises(ConfigError, match="bf16-true: AnomalyModule needs float32 weights"):
        trainer.fit(AnomalyModule(), _load(_draw(8)), _load(_draw(4)))


def test_what_was_mirrored_beyond_the_edge_does_not_score(
    model: AnomalyModule, tmp_path: Path
) -> None:
    """Whole images are padded to a common size, and `predict` gives maps of their own."""
    padded = _draw(1, seed=1)[0] | {"position": torch.zeros(2, dtype=torch.int64)}
    padded["image"][:, 10:30, 44:64] = 0.5

    class Sized(LightningDataModule):
        image_sizes_px = torch.tensor([[64, 24]])

        def test_dataloader(self) -> DataLoader[Any]:
            return _load([padded])

    trainer = make_trainer(tmp_path)
    (scores,) = trainer.test(model, _load([padded]), verbose=False)
    assert scores["test/false_alarms"] == 1
    (scores,) = trainer.test(model, datamodule=Sized(), verbose=False)
    assert scores["test/false_alarms"] == 0
