"""Plain graphs run where they are meant to, with what their metadata says alone, and answer as the `.inspect` file."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lit_data.core.errors import ConfigError, DataError
from lit_data.core.types import Floats
from lit_data.datamodules import InspectionDataModule, LabelledImageDataModule
from lit_data.loading import LoaderOptions
from lit_data.predict import PredictOptions, find_task
from lit_data.predict.net_facts import NetFacts
from lit_data.predict.options import ExportRequest
from lit_data.wings.detection import DetectionDataModule
from lit_data.wings.export import plain
from lit_data.wings.export.command import main
from lit_data.wings.export.encode import encode_file
from lit_data.wings.export.plain import FORMS, READING, write_onnx, write_torchscript
from lit_inspect.board import read_board
from lit_inspect.inspector import Inspector
from tests.helpers.reading import opened
from tests.lit_inspect.test_boxes import Detector
from tests.predict.running import Marker
from tests.predict.test_labels import Greyer

Run = Callable[[Floats], Floats]
LOADER = LoaderOptions(batch_size=2, worker_kind="inline")
MAPS, LABELS, BOXES = InspectionDataModule, LabelledImageDataModule, DetectionDataModule
OPTIONS = {
    MAPS: {},
    LABELS: {"size_px": 24},
    BOXES: {"size_px": 96, "label_format": "none", "classes": ("dot", "bar")},
}
MODELS = {MAPS: lambda: Marker(scale=60), LABELS: Greyer, BOXES: Detector}


def _open_onnx(path: Path) -> tuple[Run, dict[str, str]]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    [source] = session.get_inputs()
    return (
        lambda images: session.run(None, {source.name: images})[0],
        session.get_modelmeta().custom_metadata_map,
    )


def _open_openvino(path: Path) -> tuple[Run, dict[str, str]]:
    openvino = pytest.importorskip("openvino", reason="needs pip install -e '.[openvino]'")
    core = openvino.Core()
    model = core.read_model(path)
    net = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda images: net(images)[0], model.get_rt_info("lit_data").value


def _open_torchscript(path: Path) -> tuple[Run, dict[str, str]]:
    extra = {READING: ""}
    net = torch.jit.load(path, _extra_files=extra)
    return lambda images: net(torch.from_numpy(images)).detach().numpy(), json.loads(extra[READING])


READERS = {"onnx": _open_onnx, "openvino": _open_openvino, "torchscript": _open_torchscript}


SLOW = pytest.mark.slow  # each export takes seconds


@pytest.fixture(
    scope="module",
    params=[MAPS, pytest.param(LABELS, marks=SLOW), pytest.param(BOXES, marks=SLOW)],
)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[NetFacts, Path]:
    folder = tmp_path_factory.mktemp("exported")
    kind: Any = request.param
    rng = np.random.default_rng(0)
    for number, place in enumerate(("ok", "ok", "dent", "dent")):
        target = folder / "images" / place / f"{number}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(target), cv2.blur(rng.integers(0, 256, (96, 80, 3), np.uint8), (5, 5)))
    root, cache = folder / "images", folder / "cache"
    splits = {"train": 1.0}
    options = {**OPTIONS[kind], "splits": splits, "cache_dir": str(cache), "loader": LOADER}
    data = opened(kind(str(root), **options), "predict")
    options = PredictOptions() if kind is LABELS else PredictOptions(threshold=0.6)
    asked = ExportRequest(model=MODELS[kind]().eval(), options=options, doubt=None)
    facts = find_task(data).export(asked)
    path = folder / "a.inspect"
    path.write_bytes(encode_file(facts))
    return facts, path


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("form", FORMS)
def test_a_plain_graph_answers_as_the_inspect_file(
    form: str, exported: tuple[NetFacts, Path], tmp_path: Path
) -> None:
    facts, board = exported
    suffix, write = FORMS[form]
    if form == "openvino":
        pytest.importorskip("openvino", reason="needs pip install -e '.[openvino]'")
    path = tmp_path / f"net é{suffix}"
    write(facts, read_board(board), path)
    run, reading = READERS[form](path)
    inspector = Inspector(board)
    settings = inspector.settings
    assert reading["task"] == settings.task
    assert tuple(json.loads(reading["classes"])) == settings.classes
    assert json.loads(reading["settings"])["dtype"] == "uint8"
    assert reading["input_channels"] == "R, G, B"
    assert reading["input_range"].startswith("0..1: pixels / 255")
    assert "multiples of 1 px" not in reading["input_size"]
    assert "threshold" in reading
    assert "image_threshold" not in reading
    image = cv2.cvtColor(cv2.imread(str(next(board.parent.rglob("0.png"))))[:80], cv2.COLOR_BGR2RGB)
    side = {"maps": 80, "labels": 24, "boxes": 96}[settings.task]
    scaled = cv2.resize(image, (side, side), interpolation=cv2.INTER_AREA)
    images = np.repeat(np.float32(scaled.transpose(2, 0, 1)[None]) / 255, 3, axis=0)
    answers = run(images)
    np.testing.assert_allclose(answers, inspector.run(images), atol=1e-4)
    if form == "onnx" and settings.task == "maps":
        _check_triton(path)
    if settings.task == "maps":  # which nobody scales
        probability = inspector(image).probability
        np.testing.assert_allclose(answers[0, 0], probability, atol=1e-4)
    assert sorted(part.suffix for part in tmp_path.iterdir()) == sorted(
        {suffix, *([".bin"] if form == "openvino" else [])}
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_viewers_show_axes_by_their_names(exported: tuple[NetFacts, Path], tmp_path: Path) -> None:
    import onnx

    facts, board = exported
    write_onnx(facts, read_board(board), tmp_path / "net.onnx")
    graph = onnx.load(tmp_path / "net.onnx").graph
    sides = graph.input[0].type.tensor_type.shape.dim
    assert sides[0].dim_param == "batch"
    if read_board(board).manifest["task"] == "maps":
        assert [side.dim_param for side in sides] == ["batch", "", "height", "width"]
    for value in (*graph.output, *graph.value_info):
        for side in value.type.tensor_type.shape.dim:
            assert set(re.findall(r"[A-Za-z]\w*", side.dim_param)) <= {"batch", "height", "width"}


def _check_triton(path: Path) -> None:
    """Hold the configuration in docs/deploy.md against a file."""
    import onnxruntime

    page = Path(__file__).resolve().parents[3].joinpath("docs/deploy.md").read_text("utf-8")
    form = r'(input|output) \[{ name: "(\w+)", data_type: TYPE_FP32, dims: \[(.*?)\] }\]'
    stated = {end: (name, json.loads(f"[{dims}]")) for end, name, dims in re.findall(form, page)}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for end, [value] in (("input", session.get_inputs()), ("output", session.get_outputs())):
        dims = [side if isinstance(side, int) else -1 for side in value.shape[1:]]
        assert (value.name, dims, value.type) == (*stated[end], "tensor(float)")


def test_what_cannot_be_written_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plain, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="to=openvino needs openvino: pip install openvino"):
        main(["no run", "to=openvino"])
    for form in ("openvino", "torchscript"):
        with pytest.raises(ConfigError, match=rf"to=inspect and to=onnx, not for to={form}"):
            main(["no run", f"to={form}", "int8=true"])
    with pytest.raises(ConfigError, match="to='tflite' is unknown: choose one of inspect, onnx"):
        main(["no run", "to=tflite"])
    with pytest.raises(
        ConfigError, match=r"a\.inspect: name a file that ends in \.pt, as to=torch"
    ):
        main(["no run", "a.inspect", "to=torchscript"])
    with pytest.raises(
        ConfigError, match="runtime must be true or false, and true needs to=inspect"
    ):
        main(["no run", "to=onnx", "runtime=true"])


class _Uneven(nn.Module):
    """Another answer for three images, which a trace of one does not see."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Any:
        return self.net(images) * (0.5 if len(images) == 3 else 1.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_that_is_another_net_is_not_written(
    exported: tuple[NetFacts, Path], tmp_path: Path
) -> None:
    facts, path = exported
    facts = replace(facts, net=_Uneven(facts.net).eval())
    with pytest.raises(DataError, match=r"TorchScript gives values that differ .* was not written"):
        write_torchscript(facts, read_board(path), tmp_path / "a.pt")
    assert not list(tmp_path.iterdir())
