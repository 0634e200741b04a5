"""``python -m pytest -p tests.simulated.plugin -m gpu -n 2``: the tests marked ``gpu`` on a
simulated device.

Where none can be had the tests are skipped, and the reason is told.
"""

import os
from collections.abc import Iterator

import pytest

from tests.simulated.library import UnavailableError, load

REASON = ""
try:
    _library = load()  # before torch is imported
except UnavailableError as error:
    REASON = str(error)
else:
    import torch

    from tests.simulated.cuda import install
    from tests.simulated.device import simulated
    from tests.simulated.log import LOG

    install(_library)
    LOG.installed = True
    torch.__future__.set_swap_module_params_on_conversion(True)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Run a test with the device there; fixtures see none."""
    if pyfuncitem.get_closest_marker("gpu") is None:
        return (yield)
    if REASON:
        pytest.skip(REASON)
    with simulated() as log:
        result = yield
        if os.environ.get("LIT_DATA_WAITS"):
            for (what, place), count in log.count_waits().most_common(60):
                print(f"{count:5d} {what}: {place}")
        return result
