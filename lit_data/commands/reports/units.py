"""Units of metrics, which their names tell, and which of their values are better."""

import math
import re
from typing import Final

_KNOWN: Final = {
    "seconds": "s",
    "samples_per_s": "samples/s",
    "success_rate": "%",
    "fragmentation": "%",
}
_ENDINGS: Final = {
    "_bytes_per_epoch": "B/epoch",
    "_bytes": "B",
    "_fraction": "%",
    "_success_rate": "%",
    "_per_s": "/s",
    "_us": "us",
    "_us_per_sample": "us",
    "_ms": "ms",
    "_px": "px",
    "_s": "s",
}
"""The first that fits counts."""
_SCALES: Final[dict[str, tuple[tuple[float, str], ...]]] = {
    "B": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes")),
    "B/epoch": (
        (2.0**30, "GiB/epoch"),
        (2.0**20, "MiB/epoch"),
        (2.0**10, "KiB/epoch"),
        (1.0, "bytes/epoch"),
    ),
    "s": ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "us": ((1e6, "s"), (1e3, "ms"), (1.0, "µs")),
    "%": ((0.01, "%"),),
}
"""Sizes of units and their names, the largest first."""
_LOWER: Final = re.compile(
    r"loss|error|(^|_)(mae|mse|rmse|seconds|bytes|ooms|perplexity|fid|distance|skipped|wait\w*)($|_)"
    r"|(?<!_per)_s$|false_|latency"
)
_HIGHER: Final = re.compile(
    r"per_s$|precision|recall|dice|success"
    r"|(^|_)(f1|iou|map|auc|auroc|acc|accuracy|psnr|ssim|r2|score|jaccard)($|_|\d)"
)


def find_unit(name: str) -> str:
    """Return the unit that a metric's name tells: bytes, seconds, ``%`` of a fraction, or none."""
    last = name.rpartition("/")[2]
    if last in _KNOWN:
        return _KNOWN[last]
    for ending, unit in _ENDINGS.items():
        if last.endswith(ending):
            return unit
    return ""


def choose_scale(unit: str, top: float) -> tuple[float, str]:
    """Return what numbers up to `top` are divided by to be read, and the unit they then have."""
    scales = _SCALES.get(unit)
    if scales is None:
        return 1.0, unit
    for size, name in scales:
        # 90 s are read as such; minutes and hours begin at two.
        least = 2 * size if unit == "s" and size >= 60 else size
        if abs(top) >= least:
            return size, name
    return scales[-1]


def format_value(name: str, value: object) -> str:
    """Return a value of summary.json or of a log with its unit."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    divisor, unit = choose_scale(find_unit(name), float(value))
    number = format_number(value if divisor == 1 else value / divisor)
    return f"{number} {unit}".rstrip()


def format_number(value: float) -> str:
    """Return four digits at most, more only of whole numbers."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:  # larger floats are no exact counts
        return f"{int(value):,}".replace(",", "\u202f")
    if abs(value) >= 1000:
        return f"{value:,.0f}".replace(",", "\u202f")
    if 1 <= abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:.4g}"


def find_direction(name: str) -> int:
    """Return 1 if more of a metric is better, -1 if less is, 0 where its name does not tell."""
    last = name.rpartition("/")[2]
    if _LOWER.search(last):
        return -1
    return 1 if _HIGHER.search(last) else 0
