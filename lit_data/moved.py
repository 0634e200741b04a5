"""Old names of modules that configurations and scripts of users may hold; they work for a release, with a warning."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

MOVED: Final = {
    "lit_data.augment.foreign": "lit_data.augment.external",
    "lit_data.datasets.ct_windows": "lit_data.datasets.ct.windows",
    "lit_data.inference.memory": "lit_data.inference.batch_size_table",
    "lit_data.inference.oom_retry": "lit_data.inference.batch_size_table",
    "lit_data.io.masks": "lit_data.io.images.masks",
    "lit_data.io.options": "lit_data.io.images.options",
    "lit_data.synthesis.surroundings": "lit_data.synthesis.windows",
}


class _Finder(MetaPathFinder, Loader):
    """Asked last, for what is not there under its name."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} is {new} now; the old name goes with the next release", FutureWarning, stacklevel=2)
        module = importlib.import_module(new)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__  # that of the old name: Python has just put it there
        module.__spec__ = self._specs.pop(spec.name) if spec is not None else None


def install() -> None:
    """Let Python find the old names."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
