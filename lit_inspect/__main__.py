"""``lit-inspect FILE IMAGES --out DIR``: verdicts of all images of a folder."""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import cv2

from lit_inspect.counts import counted
from lit_inspect.errors import (
    AnswerError,
    BoardError,
    ImageError,
    InspectError,
    UsageError,
    escape,
)
from lit_inspect.inspector import Inspector
from lit_inspect.layouts import Group
from lit_inspect.net import Limits
from lit_inspect.results import Results
from lit_inspect.verdicts import REVIEW, describe_counts
from lit_inspect.version import VERSION

_EPILOG = """\
DIR gets what `lit-data predict` writes, except for pictures: images.csv, defects.csv and maps/;
labels.csv of classes; detections.json and labels/ of boxes; and bad.csv. Exit codes: 0 success; 2 wrong
arguments; 3 some images are bad or got no answer from the net, and all others have a verdict; 4 the file is damaged,
needs too much memory or time, gives other answers on this machine, or DIR cannot be written."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser("lit-inspect", epilog=_EPILOG)
    parser.add_argument("file", type=Path, help="an .inspect file of `lit-data export`")
    parser.add_argument(
        "images",
        type=Path,
        help="a folder of images, of one file each or of target and references; or one image",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    parser.add_argument("--threads", type=int, help="of the net; by default one per core")
    parser.add_argument("--seconds", type=float, default=10, help="that the net may use for a tile")
    parser.add_argument("--memory-gib", type=float, default=1.5, help="that the net may use")
    parser.add_argument("--version", action="version", version=f"lit_inspect {VERSION}")
    options = parser.parse_args(argv)
    _silence_opencv()
    try:
        return _run(options)
    except InspectError as error:
        _print_error(str(error))
        return error.exit_code


def _silence_opencv() -> None:
    """Keep names and texts of files from the terminal; bad.csv has its errors."""
    if hasattr(cv2, "setLogLevel"):  # before OpenCV 5
        cv2.setLogLevel(0)
    else:
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)


def _print_error(text: str) -> None:
    print(f"lit_inspect: {escape(text)}", file=sys.stderr, flush=True)


def _give_up(reason: str) -> None:
    """End the process from another thread, because nothing else stops the net."""
    _print_error(reason)
    os._exit(BoardError.exit_code)


def _run(options: argparse.Namespace) -> int:
    if options.threads is not None and options.threads < 1:
        raise UsageError(f"--threads {options.threads} must be at least 1")
    limits = Limits(
        seconds=options.seconds,
        memory_bytes=int(min(options.memory_gib, 2**20) * 2**30),
        give_up=_give_up,
    )
    inspector = Inspector(options.file, threads=options.threads, limits=limits)
    groups = inspector.list_groups(options.images)
    folder = options.images.parent if options.images.is_file() else options.images
    results = Results(inspector, options.out, [group.name for group in groups])
    counts = Counter(_inspect(inspector, results, folder, group) for group in groups)
    if drift := results.finish():
        _print_error(
            f"the guarantee is withdrawn: the {drift} of these images differs from that of the "
            "calibration; calibrate with current images"
        )
    if results.misfits:
        _print_error(
            counted(results.misfits, "image has", "images have")
            + " references that do not fit (column references of images.csv); "
            "the verdict is review, because the differences may not be defects"
        )
    print(escape(f"{describe_counts(counts)}; {options.out}"))
    return ImageError.exit_code if results.has_bad else 0


def _inspect(inspector: Inspector, results: Results, folder: Path, group: Group) -> str:
    """Inspect an image, record its result, and return it in one word."""
    try:
        return results.add(group.name, inspector.open_group(folder, group)).verdict
    except AnswerError as error:
        results.note_unanswered(group.name, str(error))
        return REVIEW
    except (ImageError, UsageError) as error:  # an image that does not fit the model is bad too
        results.note_bad(group.name, str(error))
        return "bad"


if __name__ == "__main__":
    sys.exit(main())
