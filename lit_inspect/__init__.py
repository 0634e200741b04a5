"""Verdicts of images by an ``.inspect`` file of lit_data, without torch.

from lit_inspect import Inspector

inspector = Inspector("board.inspect")
verdict = inspector(pixels)
print(verdict.verdict, verdict.score, verdict.defects)
"""

from lit_inspect.boxes import Box
from lit_inspect.errors import AnswerError, BoardError, ImageError, InspectError, UsageError
from lit_inspect.inspector import Inspector, Verdict
from lit_inspect.net import Limits
from lit_inspect.version import VERSION as __version__

__all__ = [
    "Inspector",
    "Verdict",
    "Box",
    "Limits",
    "InspectError",
    "UsageError",
    "ImageError",
    "AnswerError",
    "BoardError",
    "__version__",
]
