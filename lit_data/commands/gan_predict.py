"""``predict`` for generative models: new images, and new objects from all sides."""

import logging
from typing import Any, Final, cast

import lightning as L
from torch import Tensor

from lit_data.callbacks.imaging.pictures import draw_grid
from lit_data.callbacks.imaging.sampling import check_sampling, sample
from lit_data.commands.gan_pictures import tile_views
from lit_data.commands.gan_views import sweep_objects
from lit_data.commands.predict_options import Predicted, PredictOptions, PredictRun
from lit_data.datamodules import GANDataModule
from lit_data.io.image_files import write_png
from lit_data.io.progress import track
from lit_data.types import Array

log = logging.getLogger(__name__)

_COUNT: Final = 64
_BATCH: Final = 16
_SHOWN: Final = 64
_OBJECTS: Final = 8


def generate(
    datamodule: GANDataModule, model: L.LightningModule, run: PredictRun, options: PredictOptions
) -> Predicted:
    """Write images that a model generates; the same seed, weights and count give the same images.

    Into the folder go ``images/<number>.png``; ``predictions.png`` with the first 64; and, where the data and the model
    know sides, ``views/<object>.png``, sheets that the datamodule can read again, and ``views.png`` with a row for each
    of these objects.

    Args:
        datamodule: A prepared and opened datamodule, which knows the sides.
        model: A module with `sample_images`.
        run: Where to write.
        options: How many.

    Returns:
        Number of images and of objects.

    Raises:
        ConfigError: The module generates no images.
    """
    check_sampling(model, "predict")
    model.to(run.make_trainer([]).strategy.root_device)
    cast(Any, model).poses = datamodule.poses  # the sides to choose from; in training its own setup does that
    count, seed = options.count or _COUNT, int(run.identity["seed"] or 0)
    images = sample(model, count, seed=seed, batch_size=options.batch_size or _BATCH)
    for number, image in enumerate(track(images, "writing images", count)):
        write_png(run.folder / "images" / f"{number:06d}.png", _to_pixels(image))
    write_png(run.folder / "predictions.png", draw_grid(images[:_SHOWN]))
    log.info("picture: %s", run.folder / "predictions.png")
    views = sweep_objects(model, datamodule.poses, min(count, _OBJECTS), seed=seed)
    if views is not None:
        for number, sides in enumerate(views):
            write_png(run.folder / "views" / f"{number:06d}.png", _to_pixels(tile_views(sides)))
        write_png(run.folder / "views.png", draw_grid(views.flatten(0, 1), columns=views.shape[1]))
        log.info("picture: %s", run.folder / "views.png")
    return Predicted({"predict/images": count, "predict/objects": 0 if views is None else len(views)})


def _to_pixels(image: Tensor) -> Array:
    """[H, W, 3] uint8, or [H, W] of a grey image [1, H, W] in 0..1."""
    pixels: Array = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels
