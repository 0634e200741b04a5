"""DESIGN: who may import whom, and how long files and functions may be."""

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "lit_data"
FILES = sorted(PACKAGE.rglob("*.py"))

ROOMS = (
    "core",
    "images",
    "annotations",
    "synthesis",
    "augment",
    "loading",
    "datasets",
    "datamodules",
    "models",
    "callbacks",
    "predict",
    "app",
)
"""Rooms of the core: each imports those before it. Wings stand beside them."""
BACKWARD = {
    # Files of annotations are looked for where the images and masks of a set are.
    ("annotations", "datasets"),
}
WINGS_FROM_ELSEWHERE = {
    # Volumes in shards.
    "wings/volumes/shards.py": "remote",
}
"""Files that import a wing which is not theirs, and why: this list only gets shorter."""
DECODERS = {"cv2", "tifffile", "PIL", "imagecodecs", "simplejpeg", "nibabel", "pydicom", "edt"}
NEEDS_NO_TORCH = ("core", "images", "annotations", "wings/remote")
"""Import torch inside functions, if at all."""
HOMES = {
    "kornia": ("augment",),
    "hydra": ("app", "wings/quality", "wings/export"),
    "omegaconf": ("app", "wings/quality", "wings/export"),
    "matplotlib": ("predict", "app", "callbacks", "wings"),
    "torchmetrics": ("models", "callbacks", "predict", "wings"),
    "lightning": (
        "core/lightning_internals.py",
        "datamodules",
        "models",
        "callbacks",
        "predict",
        "app",
        "wings",
        "testing.py",
    ),
}
"""Where alone a library is imported."""

PRIVATE_USES = {
    "test_adaptive_twins.py: _size_of_last_batch",  # sizes of pieces are forced, which nobody else may do
    "test_adaptive_twins.py: _replay",
    "fork_server.py: _local",  # of others
    # refused as targets
    *(f"test_targets.py: {name}" for name in ("_load", "_locate", "_remove_stale")),
}
INSIDE_FUNCTIONS_ONLY = DECODERS | {"onnx", "onnxruntime", "fsspec", "aiohttp"}
INSIDE_FUNCTIONS_ONLY |= {"anomalib", "safetensors", "torchvision", "faster_coco_eval"}
INSIDE_FUNCTIONS_ONLY |= {"albumentations", "datasets", "webdataset", "litdata", "fiftyone"}


@pytest.fixture(scope="module", autouse=True)
def _without_collections() -> Iterator[None]:
    """Trees of all files are millions of objects, none of which is garbage."""
    gc.disable()
    yield
    gc.enable()


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_the_core_imports_no_wing_and_a_wing_no_other() -> None:
    found: dict[str, set[str]] = {}
    for path in FILES:
        for name, _, _ in _imports(path):
            wing = _wing(name.replace(".", "/"))
            if wing and wing != _wing(f"lit_data/{_name(path)}"):
                found.setdefault(_name(path), set()).add(wing)
    assert {file: ", ".join(sorted(wings)) for file, wings in found.items()} == WINGS_FROM_ELSEWHERE


def _wing(path: str) -> str | None:
    parts = path.split("/")
    return parts[2] if parts[:2] == ["lit_data", "wings"] and len(parts) > 2 else None


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def test_rooms_of_the_core_import_those_before_them() -> None:
    places = {room: number for number, room in enumerate(ROOMS)}
    for path in FILES:
        room = _name(path).split("/")[0]
        for name, _, _ in _imports(path):
            other = name.split(".")[1] if name.startswith("lit_data.") else ""
            if room in places and other in places and (room, other) not in BACKWARD:
                assert places[other] <= places[room], f"{path} must not import {name}"


def test_libraries_are_imported_where_they_belong() -> None:
    for path in FILES:
        file = _name(path)
        for name, in_function, for_types in _imports(path):
            top = name.split(".")[0]
            if for_types:
                continue
            assert in_function or top not in INSIDE_FUNCTIONS_ONLY, f"{file}: {name} in a function"
            assert file.startswith(HOMES.get(top, file)), f"{file}: {name} belongs elsewhere"
            if top == "torch" and file.startswith(NEEDS_NO_TORCH):
                is_internal = file == "core/lightning_internals.py"
                assert in_function or is_internal, f"{file}: import {name} inside a function"


def test_nothing_outside_of_banks_asks_where_one_lies() -> None:
    for path in FILES:
        if _name(path).startswith(("images", "wings/remote", "wings/volumes")):
            continue
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.Name | ast.alias):
                name = node.id if isinstance(node, ast.Name) else node.name
                assert name not in {"ShardedBank", "ShardedStore", "ShardedVolumes"}, path


def _run(code: str) -> str:
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_importing_loads_no_heavy_library() -> None:
    steps = {
        "lit_data.datasets.patches, lit_data.wings.detection.dataset, lit_data.loading": {
            "lightning",
            "kornia",
            "hydra",
            "matplotlib",
            "cv2",
        },
        "lit_data.callbacks, lit_data.loading": {
            "hydra",
            "omegaconf",
            "tensorboard",
            "kornia",
            "wandb",
            "mlflow",
            "cv2",
            "tifffile",
        },
    }
    code = "import sys\n"
    for modules, heavy in steps.items():
        code += f"import {modules}\nprint({heavy} & sys.modules.keys())\n"
    assert _run(code).splitlines() == ["set()"] * len(steps)


def test_windows_is_refused_in_one_line() -> None:
    code = "import sys; sys.platform = 'win32'\ntry: import lit_data\n"
    assert "within WSL 2" in _run(f"{code}except ImportError as error: print(error)")


def test_files_and_functions_stay_short() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 500, path
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.FunctionDef):
                has_text = bool(ast.get_docstring(node)) and len(node.body) > 1
                first = node.body[1 if has_text else 0]
                length = (node.end_lineno or 0) - first.lineno + 1
                assert length <= 40, f"{path}: {node.name} has {length} lines"


def test_the_top_level_is_what_the_design_says() -> None:
    for name in ("callbacks", "conf"):
        link = PACKAGE.parent / name
        # Git writes what it points to into a file where a system makes no links, as Windows.
        target = str(link.readlink()) if link.is_symlink() else link.read_text(encoding="utf-8")
        assert target == f"lit_data/{name}"
    assert not [path for path in PACKAGE.rglob("*") if path.is_symlink()]
    assert not list((PACKAGE.parent / "tests").rglob("__init__.py"))


def _imports(path: Path) -> Iterator[tuple[str, bool, bool]]:
    """Name, whether it is imported inside a function, and whether only for annotations."""
    return _list_imports(_parse(path), path, in_function=False, for_types=False)


def _list_imports(
    node: ast.AST, path: Path, *, in_function: bool, for_types: bool
) -> Iterator[tuple[str, bool, bool]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield alias.name, in_function, for_types
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"relative import in {path}"
        yield node.module or "", in_function, for_types
    in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    is_condition = isinstance(node, ast.If) and isinstance(node.test, ast.Name)
    for_types |= is_condition and node.test.id == "TYPE_CHECKING"
    # Statements alone: expressions import nothing.
    for block in ("body", "orelse", "handlers", "finalbody", "cases"):
        children = getattr(node, block, ())
        for child in children if isinstance(children, list) else ():
            yield from _list_imports(child, path, in_function=in_function, for_types=for_types)


def test_tests_name_no_private_parts_of_the_package() -> None:
    defined = re.compile(r"(?:def |class |self\.|cls\.|^\s*)(_[a-zA-Z]\w+)", re.MULTILINE)
    ours = {name for path in FILES for name in defined.findall(path.read_text(encoding="utf-8"))}
    found = set()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        private = r"(?<!self)(?<!cls)\.(_[a-zA-Z]\w+)|setattr\(\s*\w+, \"(_[a-zA-Z]\w+)\""
        reached = re.findall(private, text)
        names = {name for pair in reached for name in pair} & ours - set(defined.findall(text))
        found |= {f"{path.name}: {name}" for name in names}
    assert found == PRIVATE_USES


def test_the_runtime_of_exported_files_stands_alone() -> None:
    allowed = sys.stdlib_module_names | {"lit_inspect", "numpy", "cv2", "onnxruntime", "pydantic"}
    paths = sorted((PACKAGE.parent / "lit_inspect").glob("*.py"))
    assert len(paths) > 5
    for path in paths:
        assert {name.split(".")[0] for name, _, _ in _imports(path)} <= allowed, path


def test_no_private_name_of_hydra_optuna_or_fsspec_is_imported() -> None:
    found = []
    for top in ("lit_data", "lit_inspect", "benchmarks"):
        for path in sorted((PACKAGE.parent / top).rglob("*.py")):
            for node in ast.walk(_parse(path)):
                found += [f"{path.name}: {name}" for name in _list_private(node)]
    assert found == []


def _list_private(node: ast.AST) -> list[str]:
    """Dotted names with a private part that a statement imports from libraries that have such."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    owners = re.compile(r"(hydra|hydra_plugins|optuna|fsspec|s3fs)\..*\b_")
    return [name for name in names if owners.match(name)]


def test_file_systems_of_fsspec_are_asked_by_public_names() -> None:
    private = re.compile(r"_(?:fs|class)[.]_[a-z]\w*|getattr\(self[.]_fs, f?\"_\w*")
    found = []
    for path in FILES:
        found += private.findall(path.read_text(encoding="utf-8"))
    assert found == []
