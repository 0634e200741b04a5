"""docs/scale/ray.md, on a cluster of two workers of this machine."""

from pathlib import Path

import pytest

from tests.scale.parts import PARTS, check_parts, write_dying
from tests.scale.recipes import SMALL, read_blocks, read_digest, run_python, settle, write_boards

PREPARE, TRAIN, PREDICT = read_blocks("ray", "python")
START = """\
import ray

ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def needs_ray() -> None:
    pytest.importorskip("ray", reason="needs pip install -e '.[ray]'")


def _run(code: str, folder: Path) -> str:
    (folder / "recipe.py").write_text(code)
    return run_python(["recipe.py"], folder, RAY_USAGE_STATS_ENABLED="0", RAY_DEDUP_LOGS="0")


def test_workers_of_ray_prepare_parts(tmp_path: Path) -> None:
    write_dying(tmp_path)
    code = settle(
        PREPARE,
        {
            "/data": str(tmp_path),
            "PARTS = 64": f"PARTS = {PARTS}",
            "num_cpus=8": "num_cpus=1",
            "    words = [": "    die_once(part)\n    words = [",
            "from lit_data.app import api\n": "from lit_data.app import api\nfrom dying import die_once\n",
            'ray.init()  # on a cluster: address="auto"\n': START,
        },
    )
    _run(code, tmp_path)
    check_parts(tmp_path)


def test_ray_train_trains_as_one_process(tmp_path: Path) -> None:
    write_boards(tmp_path / "boards")
    small = ", ".join(f'"{word}"' for word in ["data.patch_px=64", *SMALL])
    code = settle(
        TRAIN,
        {
            "/data/boards.shards": "/data/boards",
            "batch_size=64": "batch_size=8",
            '"resume=auto"]': f'"resume=auto", {small}]',
            "use_gpu=True": "use_gpu=False",
        },
    )
    output = _run(START + code.replace("/data", str(tmp_path)), tmp_path)
    words = ["fit", "+experiment=segmentation", f"data.root={tmp_path}/boards", "data.patch_px=64"]
    words += [*SMALL, "data.loader.global_batch_size=8", "trainer=cpu", "hydra.run.dir=alone"]
    run_python(["-m", "lit_data", *words], tmp_path)
    found = read_digest(tmp_path / "runs/night/checkpoints/last.ckpt")
    assert found == read_digest(tmp_path / "alone/checkpoints/last.ckpt"), output
    assert found["samples"] > 0


def test_actors_of_ray_predict(tmp_path: Path) -> None:
    write_boards(tmp_path / "boards")
    run = "runs/fit/segmentation/2026-01-31_12-00-00"
    words = ["fit", "+experiment=segmentation", f"data.root={tmp_path}/boards", "data.patch_px=64"]
    run_python(["-m", "lit_data", *words, *SMALL, "trainer=cpu", f"hydra.run.dir={run}"], tmp_path)
    code = settle(PREDICT, {"/data/new": "/data/boards/images"}).replace("/data", str(tmp_path))
    read_back = """
import pyarrow.dataset

table = pyarrow.dataset.dataset("{0}/found").to_table().to_pylist()
alone = Predictor(run)
equal = [row["defects"] == alone({{"path": row["path"]}})["defects"] for row in table]
print("COUNTS", sorted(row["path"][-7:] for row in table), all(equal))
"""
    output = _run(START + code + read_back.format(tmp_path), tmp_path)
    names = [f"{number:03}.png" for number in range(12)]
    assert f"COUNTS {names} True" in output
