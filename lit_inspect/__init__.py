"""Verdicts of images by an ``.inspect`` file of lit_data, without torch.

from lit_inspect import Inspector

inspector = Inspector("board.inspect")
verdict = inspector(pixels)
print(verdict.verdict, verdict.score, verdict.defects)
picture = verdict.overlay()
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lit_inspect.version import VERSION as __version__

if TYPE_CHECKING:
    from lit_inspect.boxes import Box
    from lit_inspect.errors import AnswerError, BoardError, ImageError, InspectError, UsageError
    from lit_inspect.inspector import Inspector, Verdict
    from lit_inspect.net import Limits

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

_MODULES = {"Inspector": "inspector", "Verdict": "inspector", "Box": "boxes", "Limits": "net"}

if not TYPE_CHECKING:  # otherwise mypy would accept any name

    def __getattr__(name: str) -> Any:  # noqa: ANN401 - of any of its types
        """Import a name on first use, because all processes of lit_data use only some parts."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'errors')}"), name)
