"""Net that predicts the probability of each pixel of a tile, and its predictor."""

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from lightning import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lit_data.core.errors import ConfigError, DataError
from lit_data.core.types import Array, Batch, Size
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.predict.answers import Question, read_kinds, read_probability
from lit_data.predict.forward import Forward, ForwardOptions, choose_threads
from lit_data.predict.maps import WholeImages
from lit_data.predict.options import PredictOptions
from lit_data.predict.predictor import TiledPredictor
from lit_data.predict.reach import measure_overlap_px

log = logging.getLogger(__name__)


class ProbabilityNet(nn.Module):
    """Asks a module for the probability of each pixel.

    The module gets batches as its datamodule makes them: in its `batch_format`, and through its own
    ``on_after_batch_transfer``. A tile is not a patch of the grid, so ``index``, ``image_index``
    and ``position`` are -1. No Trainer runs, so no other hook of the module is called.

    Args:
        model: Its `predict_step` returns probabilities in 0..1 in one of the forms of
            `read_probability`.
        channels: For each channel of the module's input, the number of the channel of the tile.
        batch_format: See `BaseDataModule`.
        channel_names: Names of channels that the format may pick.
        classes: Number of classes of defects; maps with another number of classes are ignored.
    """

    def __init__(
        self,
        model: LightningModule,
        channels: tuple[int, ...],
        batch_format: BatchFormat = "dict",
        channel_names: Mapping[str, int] | None = None,
        classes: int = 0,
    ) -> None:
        super().__init__()
        self.model = model
        self._classes = classes
        self._channels = channels
        self._question = Question(model, batch_format, channel_names or {})

    @override
    def forward(self, tiles: Tensor) -> Tensor:
        """Predict the probability of each pixel.

        Args:
            tiles: [B, C, h, w] float32 in 0..1, channels as they are stored.

        Returns:
            [B, 1, h, w] in 0..1; with classes [B, 1 + classes, h, w], the probability of any defect
            first.

        Raises:
            ConfigError: The module returns something else.
        """
        if self._channels != tuple(range(tiles.shape[1])):
            tiles = tiles[:, list(self._channels)]
        outputs = self._question.ask(make_batch(tiles))
        probability = read_probability(outputs)
        if probability is None or probability.shape != (tiles.shape[0], 1, *tiles.shape[2:]):
            raise ConfigError(
                f"predict_step of {type(self.model).__name__} must return probabilities "
                "[B, 1, H, W], alone or in a dict under probability, here "
                f"{[len(tiles), 1, *tiles.shape[2:]]}; it returned {_describe(outputs)}"
            )
        kinds = read_kinds(outputs) if self._classes else None
        if kinds is None or kinds.shape[1] != self._classes:
            return probability
        return torch.cat((probability, kinds), 1)


class LabelNet(nn.Module):
    """Asks a module for the probability of each class of whole images.

    Args:
        model: Its `predict_step` returns probabilities [B, classes].
        batch_format: See `BaseDataModule`.
        classes: Number of classes.
    """

    def __init__(self, model: LightningModule, batch_format: BatchFormat, classes: int) -> None:
        super().__init__()
        self.model = model
        self._classes = classes
        self._question = Question(model, batch_format, {})

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Return the probabilities [B, classes] of images [B, C, h, w] float32 in 0..1.

        Raises:
            ConfigError: The module returns something else.
        """
        outputs = self._question.ask(make_batch(images))
        if not isinstance(outputs, Tensor) or outputs.shape[1:] != (self._classes,):
            raise ConfigError(
                f"predict_step of {type(self.model).__name__} must return probabilities "
                f"[B, {self._classes}]; it returned {_describe(outputs)}"
            )
        return outputs.float()


def make_batch(images: Tensor) -> Batch:
    """Return a batch of images [B, C, h, w] that are not patches of the grid."""
    # Not len(images), which would tie what is traced to one size of batches.
    unknown = torch.full((images.shape[0],), -1, dtype=torch.int64, device=images.device)
    return {
        "image": images,
        "index": unknown,
        "image_index": unknown,
        "position": unknown[:, None].expand(-1, 2),
        "epoch": torch.zeros_like(unknown),
    }


def choose_overlap_px(
    net: nn.Module, images: WholeImages, options: PredictOptions, device: torch.device
) -> int:
    """Return `predict.overlap_px`, or the net's receptive field by default.

    If half a tile cannot hold that, the overlap is a quarter of a tile.

    Raises:
        ConfigError: The net gives no probability.
        BatchMemoryError: A single tile does not fit into memory.
    """
    if options.overlap_px is not None:
        return options.overlap_px
    if not images.exceed(options.tile_sides_px):
        return 0  # there are no seams
    return measure_overlap_px(net, images.tile_channels, options, device)


def open_predictor(
    net: nn.Module,
    images: WholeImages,
    options: PredictOptions,
    device: torch.device,
    *,
    overlap_px: int,
) -> TiledPredictor:
    """Return the predictor of some images, with defaults for the options that are not set.

    Args:
        net: A `ProbabilityNet`, converted or not.
        images: The images to predict.
        options: Options of the prediction.
        device: Where the net computes.
        overlap_px: From `choose_overlap_px`.

    Raises:
        ConfigError: The options do not fit each other, or the net gives no probability.
    """
    on_cpu = device.type == "cpu"
    threads = options.threads
    if not threads:
        # What is compiled uses all cores by itself.
        threads = 1 if options.compile else choose_threads(device)
    batch_size = options.batch_size or _choose_batch_size(options, threads, on_cpu=on_cpu)
    channels_last = options.channels_last
    if channels_last is None:  # faster on the CPU, and elsewhere in half precision
        channels_last = on_cpu or options.precision != "fp32"
    takes_any = not options.round_px and _takes_any_size(net, images, options, device)
    return TiledPredictor(
        net,
        tile_px=options.tile_sides_px,
        overlap_px=overlap_px,
        blend=options.blend,
        margin_px=options.margin_px,
        multiple_px=options.multiple_px,
        round_px=options.round_px or (1 if takes_any else options.multiple_px),
        batch_size=batch_size,
        min_batch_size=options.min_batch_size,
        max_batch_size=options.max_batch_size,
        memory_limit_bytes=options.memory_limit_bytes,
        precision=options.precision,
        channels_last=channels_last,
        compile=options.compile,
        augment=options.augment,
        value_range=images.value_range,
        threads=threads,
        readers=options.readers,
        device=device,
    )


def _takes_any_size(
    net: nn.Module, images: WholeImages, options: PredictOptions, device: torch.device
) -> bool:
    """Return True if a net takes tiles whose sides its stride does not divide.

    Many nets refuse such tiles, each with an error of another kind. It is not tried where all sides
    are multiples.
    """
    if options.compile:  # for tiles of one size, to which smaller ones are padded
        return False
    sides_px = np.concatenate((images.bank.heights_px, images.bank.widths_px))
    if not (sides_px % options.multiple_px).any():
        return True
    return takes_any_size(net, images.tile_channels, options.multiple_px, device)


def takes_any_size(net: nn.Module, channels: int, multiple_px: int, device: torch.device) -> bool:
    """Return True if a net takes a tile whose sides its stride does not divide.

    Args:
        net: A `ProbabilityNet`.
        channels: Of a tile.
        multiple_px: Total stride of the net.
        device: Where the net computes.
    """
    side_px = 4 * multiple_px + 1
    tile = torch.zeros(1, channels, side_px, side_px)
    try:
        answer = Forward(net, device, ForwardOptions()).call_plain(tile)
    except Exception as error:
        log.debug("the net does not accept tiles of %d px: %s", side_px, error)
        return False
    return answer.shape[-2:] == (side_px, side_px)


def _choose_batch_size(options: PredictOptions, threads: int, *, on_cpu: bool) -> int:
    if not on_cpu:
        size = 16
    elif threads == 1:
        size = 4
    else:
        # In threads a batch is no faster than its tiles, and for each size oneDNN makes kernels,
        # which takes 30 ms for a net.
        size = 1
    size = max(size, options.min_batch_size)
    return size if options.max_batch_size is None else min(size, options.max_batch_size)


def _describe(outputs: object) -> str:
    """Return shape or type of the outputs of a module, for messages."""
    if isinstance(outputs, dict):
        values = ", ".join(f"{key} {_describe(value)}" for key, value in outputs.items())
        return f"a dict with {values or 'nothing'}"
    if isinstance(outputs, Tensor):
        return f"{list(outputs.shape)}"
    return f"a {type(outputs).__name__}"


def read_tiles(images: WholeImages, sides_px: Size, count: int) -> Sequence[Tensor]:
    """Cut a tile from the middle of some images, [C, h, w] float32 in 0..1 each.

    Bad images are skipped.

    Raises:
        DataError: All images are bad.
    """
    tiles = list(_read_tiles(images, sides_px, count))
    if not tiles:
        raise DataError("none of the images that a net would be checked with can be read")
    return tiles


def _read_tiles(images: WholeImages, sides_px: Size, count: int) -> Iterator[Tensor]:
    # Scales pixels as the predictor does, and nothing else.
    options = ForwardOptions(value_range=images.value_range)
    scale = Forward(nn.Identity(), torch.device("cpu"), options)
    spread = np.linspace(0, len(images) - 1, min(count, len(images)))
    for number in np.unique(spread.round().astype(int)):
        try:
            pixels = np.asarray(images.load(int(number)))
        except DataError as error:
            log.warning("not checked: %s", error)
            continue
        tile = _cut_middle(pixels, sides_px)
        # The clone is no inference tensor any more, so that it can be traced with.
        yield scale(torch.from_numpy(tile)[None])[0].clone()


def _cut_middle(pixels: Array, sides_px: Size) -> Array:
    """Cut the middle of an image [C, H, W], padded symmetrically below and to the right."""
    height, width = sides_px
    top = max(pixels.shape[1] - height, 0) // 2
    left = max(pixels.shape[2] - width, 0) // 2
    tile = pixels[:, top : top + height, left : left + width]
    padding = ((0, 0), (0, height - tile.shape[1]), (0, width - tile.shape[2]))
    return np.pad(tile, padding, mode="symmetric")
