"""docs/scale/dask.md, on a cluster of two workers of this machine, one of which is killed."""

from pathlib import Path

import pytest

from tests.scale.parts import PARTS, check_parts, write_dying
from tests.scale.recipes import read_blocks, run_python, settle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_workers_of_dask_prepare_parts(tmp_path: Path) -> None:
    pytest.importorskip("distributed", reason="needs pip install -e '.[dask]'")
    [code] = read_blocks("dask", "python")
    write_dying(tmp_path)
    code = settle(
        code,
        {
            "/data": str(tmp_path),
            "PARTS = 64": f"PARTS = {PARTS}",
            "    words = [": "    die_once(part)\n    words = [",
            "from lit_data.app import api\n": "from lit_data.app import api\nfrom dying import die_once\n",
        },
    )
    (tmp_path / "recipe.py").write_text(code)
    run_python(["recipe.py"], tmp_path)
    check_parts(tmp_path)
