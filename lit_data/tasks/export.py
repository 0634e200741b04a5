"""Files for the runtime `lit_inspect`: a net, how images become its input, and golden answers."""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning import LightningModule
from torch import Tensor, nn

import lit_data
from lit_data.datamodules.detection import DetectionDataModule
from lit_data.datamodules.image import ImageDataModule
from lit_data.datamodules.image_files import MaskedImageFolder
from lit_data.datamodules.labelled import LabelledFiles
from lit_data.datasets.references import rule_of
from lit_data.errors import ConfigError
from lit_data.inference.batch_size_table import find_reach_px
from lit_data.inference.export.onnx_file import export_onnx
from lit_data.inference.forward import Forward, ForwardOptions
from lit_data.io.images.decoders import ImageDecoder, ImageSource
from lit_data.io.images.options import ReadOptions
from lit_data.io.images.scaling import Scaling
from lit_data.io.temp import scratch_folder
from lit_data.modules.detection.module import DetectionModule
from lit_data.tasks.maps import WholeImages
from lit_data.tasks.nets import (
    BoxNet,
    LabelNet,
    ProbabilityNet,
    measure_overlap_px,
    open_predictor,
    read_tiles,
    takes_any_size,
)
from lit_data.tasks.options import ExportRequest, PredictOptions, Use
from lit_data.types import Array
from lit_data.value_range import ValueRange, to_unit

log = logging.getLogger(__name__)

_Images = ImageDataModule | DetectionDataModule

_GOLDEN = 5
_GOLDEN_PX = 160  # longest side, so that the runtime starts quickly
_PROBES = 4  # tiles that the ONNX file is compared with torch on
_CPU = torch.device("cpu")
_READ = (
    "alpha",
    "cv2_order",
    "gray_to_rgb",
    "equal_channels",
    "nan_fill",
    "as_float",
    "max_pixels",
)
"""Options of reading that the runtime knows."""

_NO_MAP: dict[str, Any] = {
    **{"tiling": None, "threshold": 0.0, "image_threshold": None, "top_fraction": 0.0},
    **{"min_area_px": 0, "large_px": 0},
}
_UNUSED = (
    *PredictOptions.list_names(decides=False),
    *PredictOptions.list_names(Use.CLEANING | Use.GENERATION),
    "precision",
    "augment",
)


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """Net of one file, and all that its manifest needs beside the golden answers."""

    net: nn.Module
    probes: Sequence[Tensor]
    settings: dict[str, Any]
    scaling: Scaling | None
    values: ValueRange

    @property
    def has_one_size(self) -> bool:
        """True if all images are brought to one size, so that none is smaller."""
        return self.scaling is not None and self.scaling.size_px is not None


def encode_maps(
    data: ImageDataModule,
    images: WholeImages,
    request: ExportRequest,
    *,
    scaling: Scaling | None = None,
    shows: Literal["defects", "marks"] = "defects",
) -> bytes:
    """Return the bytes of an ``.inspect`` file of a model that predicts maps.

    Args:
        data: Opened; some of its images become golden inputs.
        images: All of them.
        request: Model and options.
        scaling: Size that images are brought to before they are stored.
        shows: What a map shows.

    Raises:
        ConfigError: The net cannot be written as ONNX, or the runtime lacks an option.
        DataError: The ONNX file gives other values than the net, or no image can be read.
    """
    _refuse_finish(data, images)
    options, model = request.options, request.model
    classes = len(images.classes)
    net = ProbabilityNet(
        model, images.channels, data.batch_format, data.channel_names, classes
    ).eval()
    options = _settle_tiles(net, images, scaling, options)
    if net(torch.zeros(1, images.tile_channels, *options.tile_sides_px)).shape[1] == 1:
        classes = 0
    facts = _Facts(
        net=net,
        probes=read_tiles(images, options.tile_sides_px, _PROBES),
        settings={
            **{"task": "maps", "classes": list(images.classes[:classes])},
            **_list_verdicts(request),
            "expand": list(images.channels),
            **_list_references(data.source, request),
            "shows": shows,
            **_list_thresholds(options),
        },
        scaling=scaling,
        values=data.transformation.values,
    )

    def answer(pixels: Array) -> Array:
        predictor = open_predictor(
            net, images, chosen_options, _CPU, overlap_px=chosen_options.overlap_px or 0
        )
        scaled = pixels if scaling is None else scaling.scale_image(pixels)
        values = next(predictor.predict([scaled]))[1].numpy()
        size_px = (pixels.shape[1], pixels.shape[2])
        return values if scaling is None else scaling.restore(values, size_px)

    graph, chosen_options = _write_graph(facts, options)
    facts.settings["tiling"] = _list_tiles(chosen_options)
    return _encode(data, facts, graph, answer)


def encode_labels(data: ImageDataModule, request: ExportRequest, good: Collection[int]) -> bytes:
    """Return the bytes of an ``.inspect`` file of a model that names the class of images.

    Args:
        data: As for `encode_maps`, as are the errors.
        request: Model and options.
        good: Numbers of the classes of good parts; without any there are no verdicts.
    """
    files = data.source
    assert isinstance(files, LabelledFiles)
    classes = list(data.classes or ())
    net = LabelNet(request.model, data.batch_format, len(classes)).eval()
    scaling = Scaling(size_px=files.size_px)
    values = data.transformation.values

    def answer(pixels: Array) -> Array:
        with torch.inference_mode():
            probabilities: Array = net(_to_input(scaling.scale_image(pixels), values))[0].numpy()
        return probabilities

    probes = []
    for pixels in _read_spread(data, _PROBES):
        probes.append(_to_input(scaling.scale_image(pixels), values)[0])
    facts = _Facts(
        net=net,
        probes=probes,
        settings={
            **_NO_MAP,
            **{"task": "labels", "classes": classes, "good": sorted(good)},
            **_list_verdicts(request),
            "image_threshold": request.options.image_threshold,
        },
        scaling=scaling,
        values=values,
    )
    graph, _ = _write_graph(facts, request.options)
    return _encode(data, facts, graph, answer)


def _refuse_finish(data: ImageDataModule, images: WholeImages) -> None:
    """Refuse images whose pixels are changed before a model gets them.

    Raises:
        ConfigError: They are.
    """
    if images.finish is None:
        return
    if data.nuisance is not None:
        raise ConfigError(
            f"data.layout={data.source.layout} makes the references of the target itself, so that an "
            ".inspect file would find nothing: train with references (data.layout=channels, files "
            "or pairs), or without any (+experiment=segmentation)"
        )
    raise ConfigError(
        "an .inspect file takes images as they are, and the predict stage augments them: leave "
        "predict out of data.augment, and train again"
    )


def _list_references(files: MaskedImageFolder, request: ExportRequest) -> dict[str, Any]:
    """Return the files of target and references for a manifest, and the limits of those that fit."""
    rule = rule_of(files.layout)
    layout: dict[str, Any] | None = None
    if rule.roles:
        assert files.files is not None
        layout = {"channels": None, "files": [files.files[role] for role in rule.roles]}
    elif rule.expand is not None:
        layout = {"channels": list(files.channels), "files": None}
    limits = None if layout is None else request.reference_limits
    return {"layout": layout, "reference_limits": limits}


def _list_verdicts(request: ExportRequest) -> dict[str, Any]:
    """Return what verdicts are worth, and what the model was trained on."""
    calibration = request.calibration
    review = guarantee = None
    if calibration is not None:
        review = [calibration.good_below, calibration.defect_above]
        # Doubtful verdicts are unsure, and nothing is promised of them.
        if not request.doubt:
            guarantee = {"promise": calibration.promise, "features": calibration.features}
    return {
        "doubt": request.doubt,
        "review": review,
        "guarantee": guarantee,
        "trained": request.trained,
    }


def encode_boxes(data: DetectionDataModule, request: ExportRequest) -> bytes:
    """Return the bytes of an ``.inspect`` file of a model that finds objects.

    Args:
        data: As for `encode_maps`, as are the errors.
        request: Model and options.
    """
    from lit_inspect.boxes import BoxRules
    from lit_inspect.rows import ArrayRows

    model, options = _check_detector(request.model), request.options
    options.refuse("an .inspect file", *_UNUSED)
    rules = BoxRules(
        sample_px=data.source.size_px,
        stride_px=data.chosen_options.get("stride_px"),
        fill=data.fill,
        iou_threshold=model.iou_threshold,
    )
    net = BoxNet(model, len(data.classes)).eval()

    def to_input(pixels: Array) -> Tensor:
        sample = next(rules.sample(ArrayRows(pixels)))
        return _to_input(sample.pixels, data.values)

    def answer(pixels: Array) -> Array:
        with torch.inference_mode():
            places: Array = net(to_input(pixels))[0].numpy()
        return rules.thin(places)

    probes = [to_input(pixels)[0] for pixels in _read_spread(data, _PROBES)]
    with torch.inference_mode():
        net(probes[0][None])  # what it cannot say is refused before it is traced
    facts = _Facts(
        net=net,
        probes=probes,
        settings={
            **_list_boxes(options, data.classes),
            **_list_verdicts(request),
            "boxes": asdict(rules),
        },
        scaling=None,
        values=data.values,
    )
    graph, _ = _write_graph(facts, options)
    return _encode(data, facts, graph, answer)


def _check_detector(model: LightningModule) -> DetectionModule:
    if type(model).predict_step is not DetectionModule.predict_step:
        raise ConfigError(
            f"{type(model).__name__} cannot be exported: boxes are for a "
            "lit_data.modules.DetectionModule whose predict_step is as it was"
        )
    assert isinstance(model, DetectionModule)
    if model.nms != "hard":
        raise ConfigError(
            f"model.nms={model.nms} is not for an .inspect file, whose runtime knows hard: train "
            "with model.nms=hard"
        )
    return model


def _list_boxes(options: PredictOptions, classes: Sequence[str]) -> dict[str, Any]:
    return {
        **_NO_MAP,
        "task": "boxes",
        "classes": list(classes),
        "threshold": options.least_score,
        "image_threshold": options.image_threshold,
        "min_area_px": options.min_area_px,
    }


def _list_thresholds(options: PredictOptions) -> dict[str, Any]:
    return {
        "threshold": options.least_score,
        "image_threshold": options.image_threshold,
        "top_fraction": options.top_fraction,
        "min_area_px": options.min_area_px,
        "large_px": options.large_px,
    }


def _list_tiles(options: PredictOptions) -> dict[str, Any]:
    return {
        "tile_px": list(options.tile_sides_px),
        "overlap_px": options.overlap_px,
        "margin_px": options.margin_px,
        "blend": options.blend,
        "multiple_px": options.multiple_px,
        "round_px": options.round_px,
    }


def _settle_tiles(
    net: nn.Module, images: WholeImages, scaling: Scaling | None, options: PredictOptions
) -> PredictOptions:
    """Return the options with all that ``predict`` measures of the net at its first image."""
    options.refuse("an .inspect file", *_UNUSED)
    channels, multiple_px = images.tile_channels, options.multiple_px
    are_alike = scaling is not None and scaling.size_px is not None
    if options.overlap_px is None and are_alike and not images.exceed(options.tile_sides_px):
        options = replace(options, overlap_px=0)  # there are no seams, in images to come either
    if options.overlap_px is None:
        overlap_px = measure_overlap_px(net, channels, options, _CPU)
        options = replace(options, overlap_px=overlap_px)
    assert options.overlap_px is not None
    if options.blend == "gaussian" and options.margin_px is None:
        forward = Forward(net, _CPU, ForwardOptions())
        reach_px = find_reach_px(forward, channels, options.tile_sides_px, multiple_px=multiple_px)
        if reach_px is not None and reach_px <= options.overlap_px // 2:
            options = replace(options, margin_px=reach_px)
    if options.round_px is None:
        is_free = takes_any_size(net, channels, multiple_px, _CPU)
        options = replace(options, round_px=1 if is_free else multiple_px)
    return options


def _write_graph(facts: _Facts, options: PredictOptions) -> tuple[bytes, PredictOptions]:
    """Return the ONNX graph, and the options with what its axes allow.

    Raises:
        ConfigError: See `export_onnx`; or the file takes no single image.
    """
    with scratch_folder() as folder:
        exported = export_onnx(facts.net, Path(folder, "net.onnx"), facts.probes)
        graph = exported.path.read_bytes()
    if "batch" not in exported.free_axes:
        raise ConfigError(
            "the net cannot be written for single images: it must take a batch of any size "
            "(images.shape[0], not len(images))"
        )
    is_map = facts.settings["task"] == "maps"
    if is_map and not {"height", "width"} <= set(exported.free_axes):
        sides = options.tile_sides_px
        if not facts.has_one_size:
            log.warning(
                "the net can be written for tiles of %d x %d px alone: smaller images are filled up "
                "to that by repeating their edge",
                *sides,
            )
        options = replace(options, round_px=max(sides))
    return graph, options


def _encode(data: _Images, facts: _Facts, graph: bytes, answer: Callable[[Array], Array]) -> bytes:
    from lit_inspect.board import NET, encode_array, encode_board

    bank, values, scaling = data.bank, facts.values, facts.scaling
    parts = {NET: graph}
    for number, pixels in enumerate(_read_golden(data)):
        parts[f"golden/{number}.npy"] = encode_array(pixels)
        parts[f"golden/{number}_answer.npy"] = encode_array(answer(pixels))
    sizes = None
    if scaling is not None:
        size_px = None if scaling.size_px is None else list(scaling.size_px)
        sizes = {"size_px": size_px, "factor": scaling.factor, "fit": scaling.fit}
    manifest = {
        "boxes": None,
        **facts.settings,
        "read": _list_read(data.source.read),
        "channels": bank.channels,
        "dtype": bank.dtype.name,
        "value_range": None if values == ValueRange() else [values.low, values.high],
        "scaling": sizes,
        "golden": _GOLDEN,
        "versions": {"lit_data": lit_data.__version__, "torch": torch.__version__},
    }
    return encode_board(manifest, parts)


def _list_read(read: ReadOptions) -> dict[str, Any]:
    """Return the options of reading for a manifest.

    Raises:
        ConfigError: One is set that the runtime lacks.
    """
    values = asdict(read)
    for name, default in asdict(type(read)()).items():
        # Depths that are scaled are those of files that the runtime refuses.
        is_known = name in (*_READ, "max_image_bytes", "depth")
        if not is_known and values[name] != default:
            raise ConfigError(
                f"data.read.{name}={values[name]} is none of the options that lit_inspect knows "
                f"({', '.join(_READ)}): leave it out"
            )
    if read.alpha not in ("opaque", "drop"):
        raise ConfigError(
            f"data.read.alpha={read.alpha} is not for an .inspect file: set opaque or drop"
        )
    return {name: values[name] for name in _READ}


def _read_golden(data: _Images) -> Iterator[Array]:
    """Yield parts of images as they are read, before any scaling: [C, h, w]."""
    pictures = list(_read_spread(data, _GOLDEN))
    for number in range(_GOLDEN):
        pixels = pictures[number % len(pictures)]
        # Of few images other parts are taken.
        top = max(pixels.shape[1] - _GOLDEN_PX, 0) * number // _GOLDEN
        left = max(pixels.shape[2] - _GOLDEN_PX, 0) * number // _GOLDEN
        part = pixels[:, top : top + _GOLDEN_PX, left : left + _GOLDEN_PX]
        yield np.ascontiguousarray(part)


def _read_spread(data: _Images, count: int) -> Iterator[Array]:
    """Yield some images as they are read, before any scaling."""
    bank = data.bank
    spread = np.linspace(0, len(bank) - 1, min(count, len(bank))).round().astype(int)
    decoder = ImageDecoder(data.source.read)
    # Files that lie in shards are not here.
    is_as_read = isinstance(data.source.decoder, ImageDecoder) or data.source.shards is not None
    for number in spread.tolist():
        if is_as_read:
            yield np.asarray(bank[number])
        else:
            yield decoder(ImageSource((bank.name(number),))).array


def _to_input(pixels: Array, values: ValueRange) -> Tensor:
    """Return stored pixels [C, h, w] as the input of a net, [1, C, h, w] float32 in 0..1."""
    return to_unit(torch.from_numpy(pixels.astype(np.float32))[None], values)
