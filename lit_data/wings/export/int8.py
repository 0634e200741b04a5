"""Int8 versions of exported files: calibrated on training images, and discarded if the score drops."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from lightning import Trainer
from omegaconf import DictConfig, OmegaConf

from lit_data.app.build import build_datamodule, build_model
from lit_data.app.checkpoints import EXPORTED
from lit_data.app.exported import Graph, open_exported, use_exported
from lit_data.app.terminal import quieten
from lit_data.core.checks import check_count, check_fraction, check_types
from lit_data.core.errors import ConfigError
from lit_data.core.temp import scratch_folder
from lit_data.core.types import Floats
from lit_data.datamodules.base import BaseDataModule
from lit_data.testing import QUIET
from lit_data.wings.export.onnx_file import quantise

log = logging.getLogger(__name__)

_REPEATS = 5
_MONITOR = "callbacks.checkpoint"
_UNMONITORED = "val/image_auroc"
"""Score of models that train in one pass, such as a memory bank, and have no checkpoint to choose."""


@dataclass(frozen=True, kw_only=True)
class Int8Options:
    """Int8 options of ``export``.

    Args:
        int8: Compute in int8, if the score allows it.
        int8_images: Number of training samples that set the ranges of activations.
        int8_drop: Largest accepted drop of the validation score by which checkpoints are chosen;
            the file stays in float32 if the drop is larger.

    Raises:
        ConfigError: A value is out of its range.
    """

    int8: bool = False
    int8_images: int = 64
    int8_drop: float = 0.01

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_types(Int8Options, vars(self))
        check_count("int8_images", self.int8_images, 1)
        check_fraction("int8_drop", self.int8_drop)


def choose_precision(encoded: bytes, cfg: DictConfig, options: Int8Options) -> bytes:
    """Return an exported file in int8 if its score stays close to that in float32, otherwise unchanged.

    Args:
        encoded: The file.
        cfg: Configuration of the run, whose training samples calibrate, and whose validation
            scores.
        options: Limits of the drop and number of images.

    Raises:
        ConfigError: The net cannot be quantized, or validation does not log the score.
    """
    datamodule = build_datamodule(cfg)
    datamodule.setup("fit")
    with scratch_folder() as folder:
        before, after = (Path(folder, f"{name}{EXPORTED}") for name in ("float32", "int8"))
        before.write_bytes(encoded)
        float_graph = Graph(before)
        batches = list(read_training(datamodule, float_graph, options.int8_images))
        quantised = encode_int8(before, batches)
        after.write_bytes(quantised)
        int8_graph = Graph(after)
    scores = [score_graph(cfg, datamodule, graph) for graph in (float_graph, int8_graph)]
    speedup = _time(float_graph, batches[0]) / _time(int8_graph, batches[0])
    name = _name_score(cfg)
    drop = scores[0] - scores[1]
    if OmegaConf.select(cfg, f"{_MONITOR}.mode") == "min":
        drop = -drop
    result = (
        f"{name} {scores[1]:.4g} in int8 and {scores[0]:.4g} in float32, {speedup:.2g} times as "
        f"fast, {len(quantised)} and {len(encoded)} bytes"
    )
    if not drop <= options.int8_drop:  # in this form it refuses NaN too
        log.warning(
            "the file stays in float32, because the score drops by more than int8_drop=%g: %s",
            options.int8_drop,
            result,
        )
        return encoded
    if float_graph.inspector.settings.guarantee is not None:
        log.warning("verdicts in int8 have no guarantee: the run was calibrated in float32")
    if speedup < 1:
        log.warning("int8 is not faster on this CPU: %s", result)
    else:
        print(f"int8: {result}")
    return quantised


def read_training(datamodule: BaseDataModule, graph: Graph, count: int) -> Iterator[Floats]:
    """Yield batches of training samples [B, C, h, w] in the form of the graph's input."""
    missing = count
    with closing(datamodule.make_loader("train")) as loader:
        for batch in loader:
            images = datamodule.transform(batch, "train")["image"][:missing]
            yield graph.to_stored(images).float().numpy()
            missing -= len(images)
            if missing <= 0:
                return


def encode_int8(path: Path, batches: list[Floats]) -> bytes:
    """Return an exported file in int8, with its own golden answers and without a guarantee.

    Args:
        path: The file in float32.
        batches: Inputs of its graph for the calibration.

    Raises:
        ConfigError: The net cannot be quantized, or gives no answers in int8.
    """
    from lit_inspect import InspectError
    from lit_inspect.board import NET, encode_array, encode_board, read_board
    from lit_inspect.rows import ArrayRows

    board = read_board(path)
    parts = dict(board.parts)
    parts[NET] = quantise(parts[NET], batches)
    # The calibration is for scores in float32.
    manifest = {**board.manifest, "precision": "int8", "review": None, "guarantee": None}
    with scratch_folder() as folder:
        unanswered = Path(folder, path.name)
        unanswered.write_bytes(encode_board({**manifest, "golden": 0}, parts))
        inspector = open_exported(unanswered, is_patient=True)
    for number in range(manifest["golden"]):
        image = ArrayRows(board.load_array(f"golden/{number}.npy"))
        try:
            answer = inspector.answer(image)
        except InspectError as error:
            raise ConfigError(f"int8 does not work for this net: {error}; remove int8") from error
        parts[f"golden/{number}_answer.npy"] = encode_array(answer)
    return encode_board(manifest, parts)


def score_graph(cfg: DictConfig, datamodule: BaseDataModule, graph: Graph) -> float:
    """Return the validation score by which the checkpoints of the run are chosen.

    Raises:
        ConfigError: The score is not logged, or is NaN.
    """
    model = build_model(cfg, trained=Path(cfg.ckpt))
    use_exported(model, graph)
    quieten()
    trainer = Trainer(**QUIET, limit_val_batches=cfg.trainer.get("limit_val_batches"))
    scores: Mapping[str, Any] = {}
    for logged in trainer.validate(model, datamodule=datamodule, verbose=False):
        scores = {**scores, **logged}
    name = _name_score(cfg)
    if name not in scores:
        raise ConfigError(
            f"int8 is judged by {name} of the run, but validation logs "
            f"{', '.join(scores) or 'nothing'}: remove int8"
        )
    score = float(scores[name])
    if math.isnan(score):
        raise ConfigError(
            f"int8 is judged by {name} of the run, which is undefined for its validation split, "
            "because it has nothing to find: remove int8, or choose a split with data.splits"
        )
    return score


def _name_score(cfg: DictConfig) -> str:
    """Return the name of the score that int8 is judged by."""
    monitor = OmegaConf.select(cfg, f"{_MONITOR}.monitor")
    return _UNMONITORED if monitor is None else str(monitor)


def _time(graph: Graph, batch: Floats) -> float:
    """Return the median seconds of a call."""
    times_s = []
    for _ in range(_REPEATS + 1):
        began_s = perf_counter()
        graph.inspector.run(batch)
        times_s.append(perf_counter() - began_s)
    return median(times_s[1:])  # without the first, which initializes
