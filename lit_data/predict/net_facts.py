"""Exported nets: how an image becomes their input, and what a file holds in addition to the graph."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lit_data.core.errors import ConfigError
from lit_data.core.types import Array
from lit_data.core.value_range import ValueRange, to_unit
from lit_data.datamodules.image import ImageDataModule
from lit_data.datamodules.image_files import ImageFolder, MaskedImageFolder
from lit_data.datamodules.labelled import LabelledFiles
from lit_data.datasets.references import rule_of
from lit_data.images.bank import ImageBank
from lit_data.images.decoders import ImageDecoder, ImageSource
from lit_data.images.read_options import ReadOptions
from lit_data.images.scaling import Scaling
from lit_data.predict.forward import Forward, ForwardOptions
from lit_data.predict.maps import WholeImages
from lit_data.predict.nets import (
    LabelNet,
    ProbabilityNet,
    open_predictor,
    read_tiles,
    takes_any_size,
)
from lit_data.predict.options import ExportRequest, PredictOptions, Use
from lit_data.predict.reach import find_reach_px, measure_overlap_px

PROBES = 4
"""Inputs that a written graph is compared with torch on."""
_CPU = torch.device("cpu")

NO_MAP: dict[str, Any] = {
    "tiling": None,
    "threshold": 0.0,
    "image_threshold": None,
    "top_fraction": 0.0,
    "min_area_px": 0,
    "large_px": 0,
}
"""Settings of a file that gives no maps."""
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
UNUSED = (
    *PredictOptions.list_names(decides=False),
    *PredictOptions.list_names(Use.CLEANING | Use.GENERATION),
    "precision",
    "augment",
)
"""Options of ``predict`` that mean nothing in a file."""


@dataclass(frozen=True, kw_only=True)
class NetFacts:
    """A net to export, and everything that its file says about it.

    Args:
        net: From images [B, C, h, w] float32 in 0..1 to the outputs of the file.
        probes: Inputs [C, h, w] of the net.
        settings: Settings of the manifest, by name.
        scaling: Size to which images are scaled before they go to the net.
        values: Stored values that mean 0 and 1.
        options: Options of ``predict``.
        bank: Images, some of which become golden inputs.
        source: Has the options by which image files are read.
        answer: Returns torch's output for stored pixels [C, h, w] and options.
    """

    net: nn.Module
    probes: Sequence[Tensor]
    settings: dict[str, Any]
    scaling: Scaling | None
    values: ValueRange
    options: PredictOptions
    bank: ImageBank
    source: ImageFolder
    answer: Callable[[Array, PredictOptions], Array]

    @property
    def has_one_size(self) -> bool:
        """True if all images are scaled to one size, so that none is smaller."""
        return self.scaling is not None and self.scaling.size_px is not None


def list_settings(facts: NetFacts, options: PredictOptions) -> dict[str, Any]:
    """Return what `lit_inspect` knows about a net and its images, see `lit_inspect.settings.Settings`.

    Args:
        facts: The net.
        options: Options of the net, which the graph may have changed.

    Raises:
        ConfigError: The runtime does not support a read option.
    """
    bank, values, scaling = facts.bank, facts.values, facts.scaling
    sizes = None
    if scaling is not None:
        size_px = None if scaling.size_px is None else list(scaling.size_px)
        sizes = {"size_px": size_px, "factor": scaling.factor, "fit": scaling.fit}
    tiling = {"tiling": _list_tiles(options)} if facts.settings["task"] == "maps" else {}
    return {
        "boxes": None,
        **facts.settings,
        **tiling,
        "read": _list_read(facts.source.read),
        "channels": bank.channels,
        "dtype": bank.dtype.name,
        "value_range": None if values == ValueRange() else [values.low, values.high],
        "scaling": sizes,
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
                f"data.read.{name}={values[name]} is not an option that lit_inspect knows "
                f"({', '.join(_READ)}): remove it"
            )
    if read.alpha not in ("opaque", "drop"):
        raise ConfigError(
            f"data.read.alpha={read.alpha} cannot be used in an .inspect file: set opaque or drop"
        )
    return {name: values[name] for name in _READ}


def describe_maps(
    data: ImageDataModule,
    images: WholeImages,
    request: ExportRequest,
    *,
    scaling: Scaling | None = None,
    shows: Literal["defects", "marks"] = "defects",
) -> NetFacts:
    """Describe the net of a model that predicts maps.

    Args:
        data: Opened; some of its images become golden inputs.
        images: All of them.
        request: Model and options.
        scaling: Size that images are brought to before they are stored.
        shows: What a map shows.

    Raises:
        ConfigError: The pixels are changed before the model gets them, or an option cannot be
            exported.
        DataError: No image can be read.
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

    def answer(pixels: Array, options: PredictOptions) -> Array:
        predictor = open_predictor(net, images, options, _CPU, overlap_px=options.overlap_px or 0)
        scaled = pixels if scaling is None else scaling.scale_image(pixels)
        values = next(predictor.predict([scaled]))[1].numpy()
        size_px = (pixels.shape[1], pixels.shape[2])
        return values if scaling is None else scaling.restore(values, size_px)

    return NetFacts(
        net=net,
        probes=read_tiles(images, options.tile_sides_px, PROBES),
        settings={
            "task": "maps",
            "classes": list(images.classes[:classes]),
            **list_verdicts(request),
            "expand": list(images.channels),
            **_list_references(data.source, request),
            "shows": shows,
            **_list_thresholds(options),
        },
        scaling=scaling,
        values=data.transformation.values,
        options=options,
        bank=data.bank,
        source=data.source,
        answer=answer,
    )


def describe_labels(
    data: ImageDataModule, request: ExportRequest, good: Collection[int]
) -> NetFacts:
    """Describe the net of a model that predicts the class of images.

    Args:
        data: As for `describe_maps`, as are the errors.
        request: Model and options.
        good: Numbers of the good classes; without any, there are no verdicts.
    """
    files = data.source
    assert isinstance(files, LabelledFiles)
    classes = list(data.classes or ())
    net = LabelNet(request.model, data.batch_format, len(classes)).eval()
    scaling = Scaling(size_px=files.size_px)
    values = data.transformation.values

    def answer(pixels: Array, options: PredictOptions) -> Array:
        with torch.inference_mode():
            probabilities: Array = net(to_input(scaling.scale_image(pixels), values))[0].numpy()
        return probabilities

    probes = []
    for pixels in read_spread(data.bank, files, PROBES):
        probes.append(to_input(scaling.scale_image(pixels), values)[0])
    return NetFacts(
        net=net,
        probes=probes,
        settings={
            **NO_MAP,
            "task": "labels",
            "classes": classes,
            "good": sorted(good),
            **list_verdicts(request),
            "image_threshold": request.options.image_threshold,
        },
        scaling=scaling,
        values=values,
        options=request.options,
        bank=data.bank,
        source=files,
        answer=answer,
    )


def _refuse_finish(data: ImageDataModule, images: WholeImages) -> None:
    """Refuse images whose pixels are changed before a model gets them.

    Raises:
        ConfigError: They are.
    """
    if images.finish is None:
        return
    if data.nuisance is not None:
        raise ConfigError(
            f"data.layout={data.source.layout} makes the references from the target itself, so "
            "an .inspect file would find nothing: train with references (data.layout=channels, "
            "files or pairs), or without any (experiment=segmentation)"
        )
    raise ConfigError(
        "an .inspect file uses images as they are, but the predict stage augments them: remove "
        "predict from data.augment, and train again"
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


def list_verdicts(request: ExportRequest) -> dict[str, Any]:
    """Return how reliable verdicts are, and what the model was trained on."""
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


def _list_thresholds(options: PredictOptions) -> dict[str, Any]:
    return {
        "threshold": options.least_score,
        "image_threshold": options.image_threshold,
        "top_fraction": options.top_fraction,
        "min_area_px": options.min_area_px,
        "large_px": options.large_px,
    }


def _settle_tiles(
    net: nn.Module, images: WholeImages, scaling: Scaling | None, options: PredictOptions
) -> PredictOptions:
    """Return the options with all that ``predict`` measures of the net at its first image."""
    options.refuse("an .inspect file", *UNUSED)
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


def read_spread(bank: ImageBank, source: ImageFolder, count: int) -> Iterator[Array]:
    """Yield some images, before any scaling."""
    spread = np.linspace(0, len(bank) - 1, min(count, len(bank))).round().astype(int)
    decoder = ImageDecoder(source.read)
    # Files that lie in shards are not here.
    is_as_read = isinstance(source.decoder, ImageDecoder) or source.shards is not None
    for number in spread.tolist():
        if is_as_read:
            yield np.asarray(bank[number])
        else:
            yield decoder(ImageSource((bank.name(number),))).array


def to_input(pixels: Array, values: ValueRange) -> Tensor:
    """Return stored pixels [C, h, w] as the input of a net, [1, C, h, w] float32 in 0..1."""
    return to_unit(torch.from_numpy(pixels.astype(np.float32))[None], values)
