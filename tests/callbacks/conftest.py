"""What all tests of callbacks share."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ignore the remarks of Lightning on how a toy run could be faster."""
    ignored = "ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(ignored))
