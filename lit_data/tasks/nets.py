"""From the module of a run to a net that tells the probability of every pixel of a tile, and its predictor."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lit_data.datamodules.base import BaseDataModule
from lit_data.datamodules.batch_format import BatchFormat
from lit_data.errors import ConfigError, DataError
from lit_data.inference import TiledPredictor, measure_reach_px
from lit_data.inference.batch_size_table import try_twice
from lit_data.inference.cpu_parallel import choose_threads
from lit_data.inference.export.onnx_file import export_onnx
from lit_data.inference.export.quantise import measure_agreement, quantise
from lit_data.inference.forward import Forward, ForwardOptions
from lit_data.loading.device_timer import time_in_turn
from lit_data.tasks.answers import Question, read_kinds, read_probability
from lit_data.tasks.options import PredictOptions
from lit_data.tasks.whole_images import WholeImages
from lit_data.types import Batch

log = logging.getLogger(__name__)


_MEASURED_PX: Final = 256  # of the tile by which it is measured how far a net sees


class ProbabilityNet(nn.Module):
    """Asks a module for the probability of each pixel.

    The module gets a batch as its datamodule makes it: in its `batch_format`, and through its own
    ``on_after_batch_transfer``. A tile is no patch of the grid, so ``index``, ``image_index`` and
    ``position`` are -1. No Trainer runs, so no other hook of the module does.

    Args:
        model: Its `predict_step` returns probabilities in 0..1 in one of the forms of
            `read_probability`.
        channels: For each channel that the module gets the one of the tile.
        batch_format: See `BaseDataModule`.
        channel_names: Names of channels that the format may pick.
        classes: Kinds of defects that the module may tell apart; others than so many are not looked
            at.
    """

    def __init__(
        self,
        model: L.LightningModule,
        channels: tuple[int, ...],
        batch_format: BatchFormat = "dict",
        channel_names: Mapping[str, int] | None = None,
        classes: int = 0,
    ) -> None:
        super().__init__()
        self.model, self._classes = model, classes
        self._channels, self._question = (
            channels,
            Question(model, batch_format, channel_names or {}),
        )

    @override
    def forward(self, tiles: Tensor) -> Tensor:
        """Probability of each pixel.

        Args:
            tiles: [B, C, h, w] float32 in 0..1, channels as they are stored.

        Returns:
            [B, 1, h, w] in 0..1; with classes [B, 1 + classes, h, w], the probability of any defect
            first.

        Raises:
            ConfigError: The module returns something else.
        """
        found = self._question.ask(self._make_batch(tiles))
        probability = read_probability(found)
        if probability is None or probability.shape != (tiles.shape[0], 1, *tiles.shape[2:]):
            raise ConfigError(
                f"predict_step of {type(self.model).__name__} must return probabilities [B, 1, H, W], alone or in a "
                f"dict under probability, here {[len(tiles), 1, *tiles.shape[2:]]}; it returned {_describe(found)}"
            )
        kinds = read_kinds(found) if self._classes else None
        fits = kinds is not None and kinds.shape[1] == self._classes
        return torch.cat((probability, kinds), 1) if fits else probability  # type: ignore[arg-type]  # not None

    def _make_batch(self, tiles: Tensor) -> Batch:
        if self._channels != tuple(range(tiles.shape[1])):
            tiles = tiles[:, list(self._channels)]
        # Not len(tiles), which would tie what is traced to one size of batches.
        unknown = torch.full((tiles.shape[0],), -1, dtype=torch.int64, device=tiles.device)
        places = {
            "index": unknown,
            "image_index": unknown,
            "position": unknown[:, None].expand(-1, 2),
        }
        return {"image": tiles, **places, "epoch": torch.zeros_like(unknown)}


def prepare_net(
    model: L.LightningModule, datamodule: BaseDataModule, images: WholeImages, device: torch.device
) -> nn.Module:
    """The net that predicts: from tiles [B, C, h, w] float32 in 0..1 to what `ProbabilityNet` says.

    Args:
        model: With its weights.
        datamodule: Whose format the model wants.
        images: What is predicted.
        device: Where.
    """
    model.to(device)  # by itself, for else it would not know its device
    names = datamodule.channel_names
    return ProbabilityNet(
        model, images.channels, datamodule.batch_format, names, len(images.classes)
    )


def choose_overlap_px(
    net: nn.Module, images: WholeImages, options: PredictOptions, device: torch.device
) -> int:
    """Return `predict.overlap_px`, or the net's receptive field by default.

    A quarter of a tile if half does not hold that.

    Raises:
        ConfigError: The net gives no probability.
        BatchMemoryError: A single tile does not fit into memory.
    """
    if options.overlap_px is not None:
        return options.overlap_px
    sides, multiple = options.tile_sides_px, options.multiple_px
    if not images.exceed(sides):
        return 0  # there are no seams
    shape = min(_MEASURED_PX, sides[0]), min(_MEASURED_PX, sides[1])
    call = Forward(net, device, ForwardOptions()).call_plain
    channels = images.tile_channels
    reach = try_twice(
        lambda: measure_reach_px(call, channels, shape, multiple_px=multiple),
        f"a single tile of {channels}x{shape[0]}x{shape[1]}",
        device,
    )
    if reach is None or 2 * reach > min(sides) // 2:
        log.warning(
            "the net sees farther than a quarter of a tile (%d px), so seams may differ from what it says of the "
            "whole image: set predict.tile_px and predict.overlap_px, or predict.blend=gaussian",
            min(sides),
        )
        return min(sides) // 4
    log.info(
        "tiles of %d x %d px share %d px, as the net sees %d px to each side",
        *sides,
        2 * reach,
        reach,
    )
    return 2 * reach


def open_predictor(
    net: nn.Module,
    images: WholeImages,
    options: PredictOptions,
    device: torch.device,
    *,
    overlap_px: int,
) -> TiledPredictor:
    """The predictor of some images, with what the options leave open.

    Args:
        net: From `prepare_net`, converted or not.
        images: What is predicted.
        options: How.
        device: Where.
        overlap_px: From `choose_overlap_px`.

    Raises:
        ConfigError: The options do not fit each other, or the net gives no probability.
    """
    on_cpu, is_half = device.type == "cpu", options.precision != "fp32"
    threads = options.threads or _choose_threads(options, device)
    batch_size = options.batch_size or _choose_batch_size(options, threads, on_cpu=on_cpu)
    if options.quantise == "static":  # compiled for tiles of one size
        round_px = max(options.tile_sides_px)
    else:
        round_px = options.round_px or (
            1 if _takes_any_size(net, images, options, device) else options.multiple_px
        )
    return TiledPredictor(
        net,
        tile_px=options.tile_sides_px,
        overlap_px=overlap_px,
        blend=options.blend,
        margin_px=options.margin_px,
        multiple_px=options.multiple_px,
        round_px=round_px,
        batch_size=batch_size,
        min_batch_size=options.min_batch_size,
        max_batch_size=options.max_batch_size,
        memory_limit_bytes=options.memory_limit_bytes,
        precision=options.precision,
        channels_last=(on_cpu or is_half)
        if options.channels_last is None
        else options.channels_last,
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
    """Whether a net gives a value for each pixel of a tile whose sides its stride does not divide.

    Many nets refuse such tiles, each with an error of its own kind. It is not asked where all sides
    are multiples.
    """
    if options.compile:  # for tiles of one size, to which smaller ones are filled up
        return False
    if not any(
        (sides % options.multiple_px).any()
        for sides in (images.bank.heights_px, images.bank.widths_px)
    ):
        return True
    side_px = 4 * options.multiple_px + 1
    tile = torch.zeros(1, images.tile_channels, side_px, side_px)
    try:
        answer = Forward(net, device, ForwardOptions()).call_plain(tile)
    except Exception as error:
        log.debug("the net takes no tile of %d px: %s", side_px, error)
        return False
    return answer.shape[-2:] == (side_px, side_px)


def _choose_threads(options: PredictOptions, device: torch.device) -> int:
    return 1 if options.compile or options.quantise == "static" else choose_threads(device)


def _choose_batch_size(options: PredictOptions, threads: int, *, on_cpu: bool) -> int:
    # In threads a batch is no faster than its tiles, and for each size oneDNN makes kernels, which
    # takes 30 ms for a net.
    size = max((4 if threads == 1 else 1) if on_cpu else 16, options.min_batch_size)
    return size if options.max_batch_size is None else min(size, options.max_batch_size)


def _describe(found: object) -> str:
    if isinstance(found, dict):
        return f"a dict with {', '.join(f'{key} {_describe(value)}' for key, value in found.items()) or 'nothing'}"
    return f"{list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"


_COMPARED: Final = 4  # images, each one tile
_REPEATS: Final = 3


def convert_net(
    net: nn.Module, images: WholeImages, options: PredictOptions
) -> tuple[nn.Module, dict[str, Any]]:
    """Do what the options ask for.

    Args:
        net: On the CPU, from [B, C, h, w] float32 in 0..1 to probability [B, K, h, w].
        images: Those to predict; some of them, spread evenly, set the ranges of int8 and are
            compared.
        options: With ``quantise`` or ``onnx``.

    Returns:
        The net that predicts, and the keys of summary.json:

        - ``predict/quantise_mean_difference``, ``predict/quantise_max_difference``: of the
          probabilities to those of float32, on up to four tiles of other images than the
          calibration's, if there are more
        - ``predict/quantise_dice_to_fp32``: of both masks; not there if neither marks a pixel
        - ``predict/quantise_marked_share``: share of their pixels that float32 marks
        - ``predict/quantise_speedup``: time of float32 by that of the quantised net, in the same
          memory format
        - ``predict/onnx_max_difference``: largest difference between onnxruntime and torch

    Raises:
        ConfigError: What is asked for does not fit the net, or something that it needs is not
            installed.
        DataError: No image can be read, or the ONNX file gives other values than the net.
    """
    if options.quantise is None and options.onnx is None:
        return net, {}
    if any(weight.device.type != "cpu" for weight in net.parameters()):
        raise ConfigError("predict.quantise and predict.onnx are for the CPU: add trainer=cpu")
    wanted = options.calibration_images if options.quantise == "static" else 0
    tiles = read_tiles(images, options.tile_sides_px, wanted + _COMPARED)
    compared, metrics = tiles[-_COMPARED:], {}
    if options.onnx is not None:
        written = export_onnx(net.eval(), options.onnx, compared)
        axes = " and ".join(written.free_axes) or "no axis"
        log.info(
            "%s: %s free, %.2g away from torch at most", written.path, axes, written.max_difference
        )
        metrics["predict/onnx_max_difference"] = written.max_difference
    if options.quantise is None:
        return net, metrics
    calibration = (tiles[:-_COMPARED] or tiles) if wanted else []
    quantised = quantise(
        net, mode=options.quantise, calibration=[tile[None] for tile in calibration]
    )
    return quantised, metrics | _compare(net, quantised, compared, options)


def read_tiles(images: WholeImages, sides_px: tuple[int, int], count: int) -> Sequence[Tensor]:
    """Cut a tile from the middle of some images, [C, h, w] float32 in 0..1 each.

    Bad images are left out.

    Raises:
        DataError: All are bad.
    """
    tiles = list(_read_tiles(images, sides_px, count))
    if not tiles:
        raise DataError(
            "none of the images that a net would be calibrated or checked with can be read"
        )
    return tiles


def _read_tiles(images: WholeImages, sides_px: tuple[int, int], count: int) -> Iterator[Tensor]:
    scale = Forward(
        nn.Identity(), torch.device("cpu"), ForwardOptions(value_range=images.value_range)
    )
    # In another order, so that those at the end, which are compared, are spread as well as the
    # others.
    chosen = np.unique(np.linspace(0, len(images) - 1, min(count, len(images))).round().astype(int))
    for number in np.random.default_rng(0).permutation(chosen):
        try:
            pixels = np.asarray(images.load(int(number)))
        except DataError as error:
            log.warning("left out of the calibration: %s", error)
            continue
        starts = [
            max(length - side, 0) // 2
            for length, side in zip(pixels.shape[1:], sides_px, strict=True)
        ]
        tile = pixels[:, starts[0] : starts[0] + sides_px[0], starts[1] : starts[1] + sides_px[1]]
        missing = [
            (0, side - length) for length, side in zip(tile.shape[1:], sides_px, strict=True)
        ]
        yield scale(torch.from_numpy(np.pad(tile, ((0, 0), *missing), mode="symmetric"))[None])[
            0
        ].clone()


def _compare(
    net: nn.Module, quantised: nn.Module, tiles: Sequence[Tensor], options: PredictOptions
) -> dict[str, Any]:
    device, layout = torch.device("cpu"), options.channels_last is not False
    plain = Forward(net, device, ForwardOptions(channels_last=layout))
    other = Forward(
        quantised, device, ForwardOptions(channels_last=layout, precision=options.precision)
    )
    batch = torch.stack(list(tiles))
    found = measure_agreement(plain, other, [batch], threshold=options.least_score)
    times_s = time_in_turn(
        {"fp32": lambda: plain(batch), "quantised": lambda: other(batch)}, _REPEATS, device
    )
    speedup = times_s["fp32"] / times_s["quantised"]
    log.info(
        "quantise=%s with precision=%s beside fp32 on %d tiles: probabilities differ by %.2g on average and %.2g at "
        "most, Dice of the masks %.4f, %.2f times as fast",
        *(options.quantise, options.precision, len(tiles)),
        *(found.mean_difference, found.max_difference, found.dice, speedup),
    )
    return {
        "predict/quantise_mean_difference": found.mean_difference,
        "predict/quantise_max_difference": found.max_difference,
        "predict/quantise_marked_share": found.marked_share,
        "predict/quantise_speedup": speedup,
    } | ({} if np.isnan(found.dice) else {"predict/quantise_dice_to_fp32": found.dice})
