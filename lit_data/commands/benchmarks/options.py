"""What `conf/benchmark.yaml` can say."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from omegaconf import DictConfig, OmegaConf

from lit_data.checks import check_choice
from lit_data.commands.benchmarks.rows import METHODS
from lit_data.commands.configuration.suggest import did_you_mean, nearest
from lit_data.errors import ConfigError

MODES: Final = (
    "loaders",
    "collate",
    "headroom",
    "callbacks",
    "synthesis",
    "mosaic",
    "ct",
    "predict",
    "gan",
    "gpu",
    "claims",
)

_COUNTS: Final = (
    *("repeats", "warmup_batches", "samples_in_memory", "steps", "cached_batches"),
    *("volume_side", "subset_points", "images", "tile_px"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkOptions:
    """Options of the command, validated at birth.

    Args:
        mode: `loaders` compares ways to load an experiment's samples, `collate` ways to make large batches of samples
            in memory, `headroom` training with and without the work of loading, `callbacks` what callbacks cost,
            `synthesis` ways to draw defects, `mosaic` ways to make mosaics, `ct` ways to the occupied voxels of
            volumes, `predict` ways to predict images, `gan` ways to make a step of a GAN, `gpu` what a
            first GPU is asked, `claims` what circulates.
        methods: Rows to measure, of `lit_data.commands.benchmarks.table.METHODS`; `copy` comes by itself.
        workers: Numbers of workers to try; None for one number, that of the cores.
        micro_batch_sizes: Sizes to try, for the methods that have micro-batches. Mode `gan`: samples of a part.
        batch_sizes: Sizes to try; the first is the one that is recommended for.
        repeats: How often each row is measured, in turn with the others.
        seconds_per_row: Time of one measurement, without start and warm-up.
        samples_per_row: A measurement ends after this many samples too, or at the end of its time only.
        warmup_batches: Batches before each measurement, beside the first; their transfer is timed.
        defects: Draw the experiment's defects; otherwise batches stay as stored and a bare copy is measured too.
        finish: Measure until a batch is what the model sees; otherwise until it leaves the host, drawn by the workers;
            `both` prints a table of each.
        device: Where batches go: `auto`, or a device of torch.
        apply: Name under which the recommended setting is written, or None.
        apply_folder: Configuration folder that it is written to.
        sample_shape: Mode `collate`: shape of a uint8 sample.
        samples_in_memory: Mode `collate`: size of the set.
        steps: Modes `headroom`, `callbacks` and `mosaic`: training steps of each run; `predict`: before it, without a
            checkpoint.
        cached_batches: Mode `headroom`: batches that are replayed.
        compile: Modes `synthesis` and `predict`: measure augmentation or the net compiled by torch.compile too, and the
            net with int8 convolutions, which need a C++ compiler.
        train: Mode `mosaic`: finish batches on the device and train, too; `auto` where that is a CUDA device.
        volumes: Mode `ct`: how many volumes are made; None measures the experiment's.
        volume_side: Mode `ct`: voxels of a made volume along each axis.
        occupied_share: Mode `ct`: share of its voxels that are occupied.
        subset_points: Mode `ct`: points of the row that draws some.
        images: Mode `predict`: how many.
        tile_px: Mode `predict`: size of the tiles.

    Raises:
        ConfigError: A value is out of its range.
    """

    mode: str
    methods: Sequence[str]
    workers: Sequence[int] | None
    micro_batch_sizes: Sequence[int]
    batch_sizes: Sequence[int]
    repeats: int
    seconds_per_row: float
    samples_per_row: int | None
    warmup_batches: int
    defects: bool
    finish: bool | str
    device: str
    apply: str | None
    apply_folder: str
    sample_shape: Sequence[int]
    samples_in_memory: int
    steps: int
    cached_batches: int
    compile: bool
    train: bool | str
    volumes: int | None
    volume_side: int
    occupied_share: float
    subset_points: int
    images: int
    tile_px: int

    def __post_init__(self) -> None:
        """Check every range."""
        check_choice("benchmark.mode", self.mode, MODES)
        unknown = [method for method in self.methods if method not in METHODS]
        if unknown or not self.methods:
            raise ConfigError(f"benchmark.methods={list(self.methods)} must name some of {', '.join(METHODS)}")
        for name in ("micro_batch_sizes", "batch_sizes", "sample_shape"):
            _check_counts(name, getattr(self, name), 1)
        for name in _COUNTS:
            _check_counts(name, getattr(self, name), 1)
        for name, least in (("workers", 0), ("samples_per_row", 1), ("volumes", 1)):
            if getattr(self, name) is not None:
                _check_counts(name, getattr(self, name), least)
        _check_share("occupied_share", self.occupied_share)
        if not self.seconds_per_row > 0:
            raise ConfigError(f"benchmark.seconds_per_row={self.seconds_per_row!r} must be greater than 0")
        _check_switch("finish", self.finish, "both")
        _check_switch("train", self.train, "auto")
        if self.apply is not None and (self.mode != "loaders" or not re.fullmatch(r"[\w-]+", self.apply)):
            raise ConfigError(
                f"benchmark.apply={self.apply!r} must be a name of letters, digits, - and _, in mode loaders, the "
                "only one that recommends a setting"
            )

    def choose_device(self) -> torch.device:
        """The device that batches go to.

        Raises:
            ConfigError: There is no such device here.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            return torch.empty(1, device=self.device).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"benchmark.device={self.device!r} cannot be used ({reason}): choose auto or cpu"
            ) from error


def read_options(node: DictConfig) -> BenchmarkOptions:
    """The options of the node `benchmark` of a configuration.

    Raises:
        ConfigError: A value is out of its range, or a key is unknown.
    """
    given: dict[str, Any] = {str(key): value for key, value in OmegaConf.to_object(node).items()}  # type: ignore[union-attr]
    known = [field.name for field in fields(BenchmarkOptions)]
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown key 'benchmark.{name}'.{did_you_mean(nearest(name, known))}")
    return BenchmarkOptions(**given)


def _check_switch(name: str, value: object, word: str) -> None:
    if value not in (True, False, word):
        raise ConfigError(f"benchmark.{name}={value!r} is unknown: choose true, false or {word}")


def _check_share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ConfigError(f"benchmark.{name}={value!r} must be above 0 and at most 1")


def _check_counts(name: str, value: Any, least: int) -> None:  # noqa: ANN401 - a user's value
    counts = [value] if isinstance(value, int | float | str) or value is None else list(value)
    if not counts or not all(isinstance(n, int) and not isinstance(n, bool) and n >= least for n in counts):
        raise ConfigError(f"benchmark.{name}={value!r} is not usable: only whole numbers of at least {least} are")
