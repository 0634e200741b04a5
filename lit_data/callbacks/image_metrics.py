"""`ImageMetrics`: FID and KID of the images that a model generates."""

import logging
import math
from typing import Any

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from typing_extensions import override

from lit_data.callbacks.events import log_metrics
from lit_data.callbacks.image_features import (
    Distances,
    Extractor,
    extract,
    gather_features,
    on_device,
    open_extractor,
)
from lit_data.callbacks.pictures import check_sampling, read_images, sample
from lit_data.core.checks import check_count
from lit_data.core.rng import check_seed
from lit_data.core.types import Stage

log = logging.getLogger(__name__)


class ImageMetrics(Callback):
    """Measures FID and KID of a model that generates images.

    It works with any LightningModule that has a method ``sample_images(count, *, seed,
    batch_size)``, which returns [count, C, H, W] float32 in 0..1 on the host. Batches hold real
    images [B, C, H, W] in 0..1.

    - ``train/fid_small``, ``train/kid_small``: against the first `count` training images, as seen
      by the model, every `every_n_steps` training batches and at the end of the training. No unit;
      0 is best, and KID, which is unbiased, may be slightly negative.
    - ``val/fid_small``, ``val/kid_small``, ``test/...``: against the first `count` images of the
      split, at the end of each validation and test.

    They are also in ``trainer.callback_metrics``, for ModelCheckpoint and EarlyStopping. The names
    end in ``_small`` with the small fixed net, have no suffix with Inception (``fid``, ``kid``:
    comparable to papers with the same `count`), and end in ``_`` and the class name with your own
    net. FID of few images is too large: compare only runs of equal `count`. NaN if the model
    generates values that are not finite.

    Features of real images are computed once. On several ranks each rank processes its part of
    them, and all generate the same images. After a resume, real training images are taken again
    from the next batches.

    Args:
        every_n_steps: Training batches from one measurement to the next; None measures only in
            validation and test.
        count: Number of real and of generated images.
        extractor: ``small``, ``inception``, or a net from images [B, 3, H, W] float32 in 0..1 to
            features [B, D].
        weights: File with Inception's weights.
        batch_size: Number of images at once, for generating them and for their features.
        key: Key of the images if a batch is a dict; otherwise the first tensor with four dimensions
            is used.
        seed: Seed of the generated images.

    Raises:
        ConfigError: An argument is out of range, the weights do not exist, or (at the start) the
            module has no such method; later: a batch has no images.
    """

    def __init__(
        self,
        *,
        every_n_steps: int | None = 5000,
        count: int = 1000,
        extractor: Extractor | nn.Module = "small",
        weights: str | None = None,
        batch_size: int = 50,
        key: str = "image",
        seed: int = 0,
    ) -> None:
        if every_n_steps is not None:
            check_count("every_n_steps", every_n_steps, 1)
        check_count("count", count, 2)
        check_count("batch_size", batch_size, 1)
        self._net, self._suffix = open_extractor(extractor, weights)
        self.every_n_steps = every_n_steps
        self.count = count
        self.batch_size = batch_size
        self.key = key
        self.seed = check_seed(seed)
        self.real: dict[Stage, Distances] = {}
        self._done: set[Stage] = set()  # all real images of the split were processed
        self._batches = 0
        self._measured = 0  # batches at the last measurement
        self._last: dict[str, float] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "predict":
            check_sampling(pl_module, "ImageMetrics")
        self.real.clear()  # another run may have other data
        self._done.clear()

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.every_n_steps is not None:
            self._look(trainer, pl_module, batch, "train")

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._batches += 1
        if self.every_n_steps is not None and self._batches % self.every_n_steps == 0:
            for name, value in self._measure_training(trainer, pl_module).items():
                pl_module.log(name, value, on_step=True, on_epoch=False, logger=False)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if "train" in self.real:  # a resumed run may begin with the end of an epoch
            self._done.add("train")
            self._net.to("cpu")

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.every_n_steps is not None and self._measured < self._batches:
            self._measure_training(trainer, pl_module)

    def _look_at_batch(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,  # noqa: ANN401
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.sanity_checking:
            self._look(trainer, pl_module, batch, _name_split(trainer))

    def _end_split(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        stage = _name_split(trainer)
        self._done.add(stage)
        self._net.to("cpu")
        for name, value in self._measure(pl_module, stage).items():
            pl_module.log(
                name, value, sync_dist=True
            )  # equal on all ranks; Lightning warns without

    on_validation_batch_end = on_test_batch_end = _look_at_batch
    on_validation_epoch_end = on_test_epoch_end = _end_split

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"batches": self._batches, "measured": self._measured, "last": dict(self._last)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._batches = state_dict["batches"]
        self._measured = state_dict["measured"]
        self._last = dict(state_dict["last"])

    def summary(self) -> dict[str, float | int | str]:
        """Return ``train/fid_small`` and ``train/kid_small`` of the last measurement.

        Empty before the first.
        """
        return dict(self._last)

    def _look(
        self,
        trainer: Trainer,
        module: LightningModule,
        batch: Any,  # noqa: ANN401
        stage: Stage,
    ) -> None:
        real = self.real.setdefault(stage, Distances(self.count))
        if stage in self._done or real.is_full:
            return
        # It stays there until enough are processed: moving it there and back makes the host wait.
        self._net.to(module.device)
        features = extract(self._net, read_images(batch, self.key), batch_size=self.batch_size)
        if trainer.world_size > 1:
            features = gather_features(features, module.device)
        real.add(features)
        if real.is_full:
            self._net.to("cpu")

    def _measure_training(self, trainer: Trainer, module: LightningModule) -> dict[str, float]:
        self._measured = self._batches
        self._last = self._measure(module, "train")
        log_metrics(trainer, self._last)
        return self._last

    def _measure(self, module: LightningModule, stage: Stage) -> dict[str, float]:
        images = sample(module, self.count, seed=self.seed, batch_size=self.batch_size)
        with on_device(self._net, module.device):
            features = extract(self._net, images, batch_size=self.batch_size)
        distances = self.real.setdefault(stage, Distances(self.count)).measure(features)
        if math.isnan(distances["kid"]):
            log.warning(
                "ImageMetrics: generated images are not finite, "
                "or there are too few real ones to compare with"
            )
        return {f"{stage}/{name}{self._suffix}": value for name, value in distances.items()}


def _name_split(trainer: Trainer) -> Stage:
    return "test" if trainer.testing else "val"
