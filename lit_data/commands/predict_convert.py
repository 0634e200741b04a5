"""What ``predict`` can make of its net before it predicts: one of fewer bits, and an ONNX file."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from lit_data.commands.benchmarks.turns import time_in_turn
from lit_data.commands.predict_options import PredictOptions
from lit_data.commands.whole_images import WholeImages
from lit_data.errors import ConfigError, DataError
from lit_data.inference.forward import Forward, ForwardOptions
from lit_data.inference.onnx_file import export_onnx
from lit_data.inference.quantise_accuracy import measure_agreement
from lit_data.inference.quantise_net import quantise

log = logging.getLogger(__name__)

_COMPARED: Final = 4  # images, each one tile
_REPEATS: Final = 3


def convert_net(net: nn.Module, images: WholeImages, options: PredictOptions) -> tuple[nn.Module, dict[str, Any]]:
    """Do what the options ask for.

    Args:
        net: On the CPU, from [B, C, h, w] float32 in 0..1 to probability [B, K, h, w].
        images: Those to predict; some of them, spread evenly, set the ranges of int8 and are compared.
        options: With ``quantise`` or ``onnx``.

    Returns:
        The net that predicts, and the keys of summary.json:

        - ``predict/quantise_mean_difference``, ``predict/quantise_max_difference``: of the probabilities to those of
          float32, on up to four tiles of other images than the calibration's, if there are more
        - ``predict/quantise_dice_to_fp32``: of both masks; not there if neither marks a pixel
        - ``predict/quantise_marked_share``: share of their pixels that float32 marks
        - ``predict/quantise_speedup``: time of float32 by that of the quantised net, in the same memory format
        - ``predict/onnx_max_difference``: largest difference between onnxruntime and torch

    Raises:
        ConfigError: What is asked for does not fit the net, or something that it needs is not installed.
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
        log.info("%s: %s free, %.2g away from torch at most", written.path, axes, written.max_difference)
        metrics["predict/onnx_max_difference"] = written.max_difference
    if options.quantise is None:
        return net, metrics
    calibration = (tiles[:-_COMPARED] or tiles) if wanted else []
    quantised = quantise(net, mode=options.quantise, calibration=[tile[None] for tile in calibration])
    return quantised, metrics | _compare(net, quantised, compared, options)


def read_tiles(images: WholeImages, sides_px: tuple[int, int], count: int) -> Sequence[Tensor]:
    """A tile from the middle of each of some images, [C, h, w] float32 in 0..1 each; bad images are left out.

    Raises:
        DataError: All are bad.
    """
    tiles = list(_read_tiles(images, sides_px, count))
    if not tiles:
        raise DataError("none of the images that a net would be calibrated or checked with can be read")
    return tiles


def _read_tiles(images: WholeImages, sides_px: tuple[int, int], count: int) -> Iterator[Tensor]:
    scale = Forward(nn.Identity(), torch.device("cpu"), ForwardOptions(value_range=images.value_range))
    # In another order, so that those at the end, which are compared, are spread as well as the others.
    chosen = np.unique(np.linspace(0, len(images) - 1, min(count, len(images))).round().astype(int))
    for number in np.random.default_rng(0).permutation(chosen):
        try:
            pixels = np.asarray(images.load(int(number)))
        except DataError as error:
            log.warning("left out of the calibration: %s", error)
            continue
        starts = [max(length - side, 0) // 2 for length, side in zip(pixels.shape[1:], sides_px, strict=True)]
        tile = pixels[:, starts[0] : starts[0] + sides_px[0], starts[1] : starts[1] + sides_px[1]]
        missing = [(0, side - length) for length, side in zip(tile.shape[1:], sides_px, strict=True)]
        yield scale(torch.from_numpy(np.pad(tile, ((0, 0), *missing), mode="symmetric"))[None])[0].clone()


def _compare(net: nn.Module, quantised: nn.Module, tiles: Sequence[Tensor], options: PredictOptions) -> dict[str, Any]:
    device, layout = torch.device("cpu"), options.channels_last is not False
    plain = Forward(net, device, ForwardOptions(channels_last=layout))
    other = Forward(quantised, device, ForwardOptions(channels_last=layout, precision=options.precision))
    batch = torch.stack(list(tiles))
    found = measure_agreement(plain, other, [batch], threshold=options.threshold)
    times_s = time_in_turn({"fp32": lambda: plain(batch), "quantised": lambda: other(batch)}, _REPEATS, device)
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
