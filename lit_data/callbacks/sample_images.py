"""`SampleImages`: pictures of what a model generates during training."""

import logging
from pathlib import Path
from typing import Any, Literal, get_args

from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override

from lit_data.callbacks.events import check_folder, choose_folder
from lit_data.callbacks.pictures import (
    check_sampling,
    draw_grid,
    find_poses,
    publish,
    sample,
    sweep,
    turns,
)
from lit_data.core.checks import check_choice, check_count
from lit_data.core.rng import check_seed
from lit_data.core.types import PathText

log = logging.getLogger(__name__)

Views = Literal["auto", "none"]


class SampleImages(Callback):
    """Draws images that a model generates, always from the same latents.

    It works with any LightningModule that has a method ``sample_images(count, *, seed,
    batch_size)``, which returns [count, C, H, W] float32 in 0..1 on the host. If the module also
    has ``sweep_views(count, poses, seed)``, which returns [count, V, C, H, W], and the datamodule
    has ``poses``, some objects are also shown from the views of the data.

    Every `every_n_steps` training batches and at the end of the training, the callback writes
    ``images/step-<batches>.png``, and ``views-<batches>.png`` with a row for each object. It sends
    them to the loggers that accept images (TensorBoard, and those with a method ``log_image``) as
    ``images/samples`` and ``images/views``. All ranks sample, because a module may be sharded
    across them; the first one writes. The random numbers of training do not change.

    Args:
        every_n_steps: Training batches from one picture to the next.
        count: Number of images in a picture.
        views: ``auto`` also shows views, if module and data have them and they differ; ``none``
            never does.
        objects: Number of objects that are shown in views.
        path: Folder of ``images``; by default ``trainer.log_dir``, without loggers
            ``trainer.default_root_dir``. Nothing is written into the working folder.
        batch_size: Number of images generated at once.
        seed: Seed of the images.

    Raises:
        ConfigError: An argument is out of range, or (at the start) the module has no such method.
    """

    def __init__(
        self,
        *,
        every_n_steps: int = 500,
        count: int = 16,
        views: Views = "auto",
        objects: int = 4,
        path: PathText | None = None,
        batch_size: int = 16,
        seed: int = 0,
    ) -> None:
        check_count("every_n_steps", every_n_steps, 1)
        check_count("count", count, 1)
        check_count("objects", objects, 1)
        check_count("batch_size", batch_size, 1)
        check_choice("views", views, get_args(Views))
        self.every_n_steps = every_n_steps
        self.count = count
        self.views = views
        self.objects = objects
        self.path = None if path is None else Path(path)
        self.batch_size = batch_size
        self.seed = check_seed(seed)
        self._batches = 0  # of the training
        self._drawn = 0  # batches before the last picture
        self._folder: Path | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        check_sampling(pl_module, "SampleImages")
        folder = choose_folder(trainer, self.path)
        check_folder(folder, "images")
        self._folder = None if folder is None else folder / "images"
        if folder is None and trainer.is_global_zero:
            log.warning("SampleImages draws nothing without a logger: give it path=FOLDER")

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
        if self._batches % self.every_n_steps == 0:
            self._draw(trainer, pl_module)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._drawn < self._batches:  # the last batch may have drawn already
            self._draw(trainer, pl_module)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"batches": self._batches, "drawn": self._drawn}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._batches, self._drawn = state_dict["batches"], state_dict["drawn"]

    def _draw(self, trainer: Trainer, module: LightningModule) -> None:
        self._drawn = self._batches
        if self._folder is None:
            return
        # All ranks sample, because the weights may be sharded across them; the first one writes.
        images = sample(module, self.count, seed=self.seed, batch_size=self.batch_size)
        poses = None if self.views == "none" else find_poses(trainer, module)
        views = None if poses is None else sweep(module, self.objects, poses, seed=self.seed)
        if not trainer.is_global_zero:
            return
        number = f"{self._batches:06d}"
        publish(trainer, "images/samples", draw_grid(images), self._folder / f"step-{number}.png")
        if views is not None and turns(views):
            grid = draw_grid(views.flatten(0, 1), columns=views.shape[1])  # a row for each object
            publish(trainer, "images/views", grid, self._folder / f"views-{number}.png")
