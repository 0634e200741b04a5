"""Options of ``predict``, and facts about a run that writers need."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Flag, auto
from pathlib import Path
from typing import Any, NamedTuple

from lightning import LightningModule, Trainer

from lit_data.annotations.writing import FORMS
from lit_data.core.checks import check_choice, check_count, check_fraction, check_types
from lit_data.core.errors import ConfigError
from lit_data.core.grid import pair_px
from lit_data.core.parts import Part
from lit_data.images.header_scan import OnBad
from lit_data.models.segmentation.top_pixels import SCORE_FRACTION
from lit_data.predict.forward import Augment, Precision
from lit_data.predict.verdicts import Calibration
from lit_inspect.tiles import Blend


class Use(Flag):
    """Kinds of prediction for which an option has a meaning."""

    ANY = auto()
    """All of them."""
    INPUTS = auto()
    """Inputs that are predicted one by one, also by several processes, or in a run that goes on."""
    FINDING = auto()
    """Defects, marks and objects, by their scores and sizes."""
    TILES = auto()
    """Images that are predicted tile by tile."""
    WINDOWS = auto()
    """Inputs that the datamodule cuts into windows."""
    VERDICTS = auto()
    """Images that get a verdict."""
    PICTURES = auto()
    """Images with what is found drawn into each."""
    CLEANING = auto()
    """Images that something is taken out of."""
    GENERATION = auto()
    """Images that a model makes."""


def _role(use: Use = Use.ANY, *, decides: bool = True) -> dict[str, Any]:
    """Return what `PredictOptions` knows of an option.

    Args:
        use: What it means something for.
        decides: False for how the work is done, which changes results by no more than rounding.
    """
    return {"use": use, "decides": decides}


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """The options of ``predict``; conf/predict.yaml has one line for each.

    `tile_px`, `blend`, `margin_px`, `multiple_px`, `memory_limit_bytes`, `precision`, `compile`,
    `augment` and `readers` are those of `TiledPredictor`, and apply only to images that are
    predicted tile by tile.

    Args:
        threshold: Lowest probability of a marked pixel or voxel, or lowest score of an object;
            `None`: ``predict_threshold`` of the model's checkpoint, or 0.5 without it.
        image_threshold: Lowest score of a defective image; `None`: ``image_threshold`` of the
            model's checkpoint. Without it, an image with any defect is defective.
        image_score_fraction: The score of an image is the mean over this fraction of its pixels,
            those with the highest probabilities; `None`: the model's fraction, or 0.0005 without
            it. See `count_top_px`.
        min_area_px: Smallest defect or object.
        on_bad: Replaces ``data.on_bad``: `skip` predicts the rest and ends with exit code 3,
            `error` ends before anything is predicted.
        folder: Where the files go, a folder or an address; `None`: into the run folder.
        resume: Resume in the folder of an interrupted run; not for generated images.
        part: Predict one part of the inputs, a number from 0 or ``0/4``, into a folder that all
            parts share. An interrupted part resumes. Not for generated images.
        of: Number of parts, if `part` does not contain it.
        finish: Predict nothing, and write the tables of all parts.
        to: Also write label files of another tool: ``coco``, ``cvat``, ``fiftyone``, ``labelme``,
            ``labelstudio`` or ``masks``, the images that the model is least sure of first.
        first: Number of images for which to write label files; `None`: all.
        many_inputs: From this number of inputs on, files are in folders by prefix, and tables are
            Parquet.
        pictures: Write a picture of each image with the defects that are found in it.
        clean: Also write watermarked images with the marks painted over.
        count: Number of images that a generative model makes; `None`: 64.
        large_px: Images of more pixels are predicted through a temporary file.
        overlap_px: Pixels that tiles share; `None`: as many as the net's receptive field needs, at
            most half a tile.
        round_px: Sides shorter than a tile are padded to a multiple of it; `None`: 1, which adds no
            padding, or `multiple_px` for nets that do not accept every size.
        batch_size: Samples or tiles at once; `None`: as in the loader. For tiles on the CPU, 1 in
            each of several threads, or 4 in a single one; for tiles on other devices, 16.
        min_batch_size: The run ends if not even this many fit into memory.
        max_batch_size: The size grows up to this while batches fit; `None`: `batch_size`.
        channels_last: Memory format of weights and tiles; `None`: used on the CPU, and in half
            precision on other devices.
        threads: Inference threads, which call the net in parallel on the CPU; `None`: for tiles,
            one for each core that torch uses, at most 4; one for compiled nets and for other
            samples.

    Raises:
        ConfigError: A value is out of its range.
    """

    threshold: float | None = field(default=None, metadata=_role(Use.FINDING))
    image_threshold: float | None = field(default=None, metadata=_role(Use.VERDICTS))
    image_score_fraction: float | None = field(default=None, metadata=_role(Use.VERDICTS))
    min_area_px: int = field(default=2, metadata=_role(Use.FINDING))
    on_bad: OnBad = field(default="skip", metadata=_role(decides=False))
    folder: str | None = field(default=None, metadata=_role(decides=False))
    resume: bool = field(default=False, metadata=_role(Use.INPUTS, decides=False))
    part: int | str | None = field(default=None, metadata=_role(Use.INPUTS, decides=False))
    of: int | None = field(default=None, metadata=_role(Use.INPUTS, decides=False))
    finish: bool = field(default=False, metadata=_role(Use.INPUTS, decides=False))
    many_inputs: int = field(default=100_000, metadata=_role(Use.INPUTS, decides=False))
    to: str | None = field(default=None, metadata=_role(Use.INPUTS, decides=False))
    first: int | None = field(default=None, metadata=_role(Use.INPUTS, decides=False))
    pictures: bool = field(default=True, metadata=_role(Use.PICTURES))
    clean: bool = field(default=False, metadata=_role(Use.CLEANING))
    count: int | None = field(default=None, metadata=_role(Use.GENERATION))
    large_px: int = field(default=50_000_000, metadata=_role(Use.TILES))
    tile_px: int | Sequence[int] = field(default=512, metadata=_role(Use.TILES))
    overlap_px: int | None = field(default=None, metadata=_role(Use.TILES | Use.WINDOWS))
    blend: Blend = field(default="constant", metadata=_role(Use.TILES))
    margin_px: int | None = field(default=None, metadata=_role(Use.TILES))
    multiple_px: int = field(default=16, metadata=_role(Use.TILES))
    round_px: int | None = field(default=None, metadata=_role(Use.TILES))
    batch_size: int | None = field(default=None, metadata=_role(decides=False))
    min_batch_size: int = field(default=1, metadata=_role(decides=False))
    max_batch_size: int | None = field(default=None, metadata=_role(decides=False))
    memory_limit_bytes: int | None = field(default=None, metadata=_role(Use.TILES, decides=False))
    precision: Precision = field(default="fp32", metadata=_role(Use.TILES))
    channels_last: bool | None = field(default=None, metadata=_role(Use.TILES, decides=False))
    compile: bool = field(default=False, metadata=_role(Use.TILES, decides=False))
    augment: Augment | None = field(default=None, metadata=_role(Use.TILES))
    threads: int | None = field(default=None, metadata=_role(decides=False))
    readers: int = field(default=2, metadata=_role(Use.TILES, decides=False))

    def __post_init__(self) -> None:
        """Check what `TiledPredictor` does not."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        check_types(PredictOptions, values, "predict")
        check_fraction("predict.threshold", self.least_score)
        if self.image_threshold is not None:
            check_fraction("predict.image_threshold", self.image_threshold)
        check_fraction("predict.image_score_fraction", self.top_fraction)
        if min(self.min_area_px, self.large_px) < 0:
            raise ConfigError(
                f"predict.min_area_px={self.min_area_px}, predict.large_px={self.large_px}: need "
                "at least 0"
            )
        self._check_parts()
        self._check_labels()
        check_count("predict.min_batch_size", self.min_batch_size, 1)
        if self.max_batch_size is not None:
            check_count("predict.max_batch_size", self.max_batch_size, self.min_batch_size)
        if self.count is not None and self.count < 1:
            raise ConfigError(f"predict.count={self.count} must be at least 1")
        if self.overlap_px is None and self.margin_px is not None:
            raise ConfigError(f"predict.margin_px={self.margin_px} needs predict.overlap_px too")

    @property
    def least_score(self) -> float:
        """Return `threshold`, or 0.5."""
        return 0.5 if self.threshold is None else self.threshold

    @property
    def top_fraction(self) -> float:
        """Return `image_score_fraction`, or 0.0005."""
        return SCORE_FRACTION if self.image_score_fraction is None else self.image_score_fraction

    @property
    def chosen_part(self) -> Part | None:
        """Return the part of the inputs; None for all of them."""
        return Part.read("predict", self.part, self.of)

    def _check_parts(self) -> None:
        check_count("predict.many_inputs", self.many_inputs, 1)
        part = self.chosen_part
        if part is not None and self.finish:
            raise ConfigError(
                f"predict.part={part} and predict.finish=true exclude each other: finish once, when "
                "all parts are predicted"
            )
        if self.folder is None and (part is not None or self.finish):
            option = "predict.finish=true" if self.finish else f"predict.part={part}"
            raise ConfigError(
                f"{option} needs predict.folder=FOLDER, into which all parts are predicted"
            )

    def _check_labels(self) -> None:
        if self.to is not None:
            check_choice("predict.to", self.to, tuple(FORMS))
        if self.first is None:
            return
        check_count("predict.first", self.first, 1)
        if self.to is None:
            raise ConfigError(
                f"predict.first={self.first} counts the images of label files: set predict.to"
            )

    @property
    def tile_sides_px(self) -> tuple[int, int]:
        """Height and width of a tile."""
        sides = self.tile_px if isinstance(self.tile_px, int) else tuple(self.tile_px)
        return pair_px("predict.tile_px", sides)  # type: ignore[arg-type]  # it checks the length

    def identity(self) -> dict[str, Any]:
        """Return the options that decide what is written."""
        # The threshold that is used, so that 0.5 typed out and left out are the same run.
        values = asdict(self) | {"threshold": self.least_score}
        return {name: values[name] for name in self.list_names(decides=True)}

    def list_scoring(self) -> dict[str, Any]:
        """Return the options that scores of images depend on."""
        names = [*self.list_names(Use.TILES, decides=True), "image_score_fraction"]
        values = asdict(self) | {"image_score_fraction": self.top_fraction}
        return {name: values[name] for name in sorted(names)}

    @classmethod
    def list_names(cls, uses: Use | None = None, *, decides: bool | None = None) -> list[str]:
        """Return the names of the options that mean something for any of some uses.

        Args:
            uses: None: all of them.
            decides: True for those that decide what is written, False for the others.
        """
        names = []
        for each in fields(cls):
            is_used = uses is None or each.metadata["use"] & uses
            if is_used and decides in (None, each.metadata["decides"]):
                names.append(each.name)
        return names

    def refuse_unused(self, what: str, uses: Use) -> None:
        """Raise for options that are set and mean something for none of these uses.

        Raises:
            ConfigError: One is.
        """
        used = set(self.list_names(uses | Use.ANY))
        self.refuse(what, *(name for name in self.list_names() if name not in used))

    def refuse(self, what: str, *names: str) -> None:
        """Raise for options that are set and mean nothing here.

        Raises:
            ConfigError: One is.
        """
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            value = getattr(self, name)
            if value != defaults[name]:
                # As it is typed: Hydra writes true, not True.
                stated = str(value).lower() if isinstance(value, bool) else value
                raise ConfigError(f"predict.{name}={stated} has no effect on {what}: remove it")


def _wait_for_nobody() -> None:
    pass


def _is_here(path: Path) -> Path:
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Inputs of one of several processes that predict into a folder.

    Args:
        number: Which of the processes, from 0 on.
        count: How many there are.
        leads: This process opens the folder for the others, and writes the tables of all. It is the
            only one, the first rank, or the one that finishes parts.
        wait: Returns when all ranks have called it; parts wait for nobody.
    """

    number: int = 0
    count: int = 1
    leads: bool = True
    wait: Callable[[], None] = _wait_for_nobody

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def suffix(self) -> str:
        """Return the suffix of this process's files; empty for a single process."""
        return "" if self.count == 1 else f"-{self.number}-of-{self.count}"

    def take(self, inputs: Sequence[int], block: int) -> list[int]:
        """Return every so many-th block of inputs: neighbors, which are alike, go to all."""
        taken: list[int] = []
        step = block * self.count
        for start in range(block * self.number, len(inputs), step):
            taken += inputs[start : start + block]
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictRun:
    """One run of ``predict``.

    Args:
        folder: Where the files go.
        identity: What decides the predictions beside the options, as plain data: model, weights,
            how images are read.
        trainer: Of one process, without callbacks.
        share: Inputs that this process predicts.
        doubt: Why verdicts of this model are worth nothing; None where they are.
        calibration: Thresholds of verdicts with their bounds; None where there are none.
        chosen: Numbers of the images that are predicted; None: all.
        lists_defects: Write a table of the defects of images, and pictures of them.
        reference_limits: Of references that fit, see `describe_misfits`; None where none are known.
        remote_sizes: Bytes of files that lie at the address of the folder, by their names below it.
        bring: Returns a path of the folder, after the file came from that address if it is not
            here.
    """

    folder: Path
    identity: Mapping[str, Any]
    trainer: Trainer
    share: Share = Share()
    doubt: str | None = None
    calibration: Calibration | None = None
    chosen: Sequence[int] | None = None
    lists_defects: bool = True
    reference_limits: Sequence[float] | None = None
    remote_sizes: Mapping[str, int] = field(default_factory=dict)
    bring: Callable[[Path], Path] = _is_here


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """Model of an export, and the options that go into its file.

    Args:
        model: With its weights, on the host, in evaluation mode.
        options: Of ``predict``, with the thresholds of the model.
        doubt: Why verdicts of this model are worth nothing; None where they are.
        calibration: Thresholds of verdicts with their bounds; None where there are none.
        trained: What the checkpoint says of its training; None where it says nothing.
        reference_limits: As those of a `PredictRun`.
    """

    model: LightningModule
    options: PredictOptions
    doubt: str | None
    calibration: Calibration | None = None
    trained: Mapping[str, Any] | None = None
    reference_limits: Sequence[float] | None = None


class Predicted(NamedTuple):
    """Result of a run.

    Attributes:
        metrics: Numbers for summary.json.
        bad: (path, what is wrong) of each input without a prediction.
    """

    metrics: dict[str, Any]
    bad: Sequence[tuple[str, str]] = ()
