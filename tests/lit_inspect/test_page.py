"""What docs/deploy.md shows runs: the page to try a model on, and the wheel of the runtime."""

import csv
import hashlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from base64 import urlsafe_b64encode
from email import message_from_bytes
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lit_data.wings.export.runtime import write_runtime
from tests.lit_inspect.boards import write_board

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")


# Gradio leaves a loop open when it is imported.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_page_to_try_a_model_on_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnx = pytest.importorskip("onnx", reason="needs onnx: pip install -e '.[export]'")
    [code] = [
        code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "gradio" in code
    ]
    assert len(code.strip().splitlines()) <= 22
    if find_spec("gradio") is None:
        code = code.partition("import gradio")[0]
    axes = onnx.helper.make_tensor("axes", onnx.TensorProto.INT64, [1], [1])
    nodes = [onnx.helper.make_node("ReduceMax", ["images", "axes"], ["probability"], keepdims=1)]
    write_board(
        tmp_path / "board.inspect", channels=3, nodes=nodes, weights=[axes], image_threshold=0.5
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "docs/deploy.md", "exec"), names)
    image = np.zeros((40, 30, 3), np.uint8)
    image[10:14, 5:9] = 200
    text, overlay = names["answer"](image)
    assert text.startswith("defect, score 0.78")
    assert overlay.shape == image.shape
    assert overlay.dtype == np.uint8
    assert overlay[12, 7].tolist() == [243, 43, 43]
    assert not overlay[20:].any()
    if "demo" in names:
        assert names["demo"].fn is names["answer"]


def test_the_wheel_of_the_runtime_installs_and_runs(tmp_path: Path) -> None:
    path = write_runtime(tmp_path)
    assert path.name in PAGE
    assert write_runtime(tmp_path).read_bytes() == path.read_bytes()
    with zipfile.ZipFile(path) as wheel:
        contents = {name: wheel.read(name) for name in wheel.namelist()}
    [record] = [name for name in contents if name.endswith("/RECORD")]
    rows = list(csv.reader(StringIO(contents[record].decode())))
    assert {row[0] for row in rows} == contents.keys()
    for name, digest, size in rows:
        if name != record:
            data = contents[name]
            found = urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={found}", len(data))
    metadata = message_from_bytes(contents[record.replace("RECORD", "METADATA")])
    project = tomllib.loads((ROOT / "lit_inspect/pyproject.toml").read_text())["project"]
    assert metadata.get_all("Requires-Dist") == project["dependencies"]
    assert metadata["Name"] == project["name"] == "lit-inspect"
    modules = {f"lit_inspect/{path.name}" for path in (ROOT / "lit_inspect").glob("*.py")}
    assert modules < contents.keys()


@pytest.mark.slow  # pip and another interpreter
def test_pip_takes_the_wheel_of_the_runtime(tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(write_runtime(tmp_path))], check=True)
    run = subprocess.run(
        [sys.executable, str(site / "bin/lit-inspect"), "--version"],
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert run.stdout.startswith("lit_inspect ")
