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
FILES = sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "callbacks").rglob("*.py")})

LAYERS = {
    "__init__": 1, "errors": 0, "checks": 0, "files": 0, "child_process": 0, "import_path": 0,
    "types": 0, "rng": 0, "grid": 0, "mosaic": 0, "out_of_memory": 0, "parts": 0, "size_search": 0, "batch_form": 0, "value_range": 0, "devices": 0, "heap": 0,
    "io": 1,
    "risk": 1,
    "synthesis": 2,
    "datasets": 3, "loading": 3, "augment": 3, "inference": 3,
    "lightning_internals": 4, "samples": 4,
    "datamodules": 5, "modules": 5, "callbacks": 5,
    "tasks": 6, "testing": 6,
    "commands": 7, "cli": 7, "api": 7, "__main__": 7,
}  # fmt: skip
DECODERS = {"cv2", "tifffile", "PIL", "imagecodecs", "simplejpeg", "nibabel", "pydicom", "edt"}
OUTSIDE = [
    {"numpy", "pydantic", "lit_inspect"},
    DECODERS | {"filelock", "psutil", "rich", "yaml", "fsspec", "aiohttp"},
    {"torch", "onnx", "onnxruntime"},
    {"kornia", "torchvision"},
    {"lightning", "packaging"},
    {"torchmetrics", "faster_coco_eval", "anomalib", "safetensors"},
    {"matplotlib", "pyarrow"},
    {"hydra", "omegaconf", "yaml", "jinja2", "markupsafe"},
]
"""What each layer may import beside the layers below it."""

PRIVATE_USES = {
    "test_adaptive_twins.py: _size_of_last_batch",  # sizes of pieces are forced, which nobody else may do
    "test_adaptive_twins.py: _replay",
    "fork_server.py: _local",  # of others
    # refused as targets
    *(f"test_targets.py: {name}" for name in ("_load", "_locate", "_remove_stale")),
}
ONLY_HERE = {
    "kornia": ["augment"],
    "hydra": ["commands"],
    "omegaconf": ["commands"],
    "matplotlib": ["tasks", "commands", "callbacks"],  # timelines are drawn in plain scripts too
}
INSIDE_FUNCTIONS_ONLY = DECODERS | {"onnx", "onnxruntime", "fsspec", "aiohttp"}
INSIDE_FUNCTIONS_ONLY |= {"anomalib", "safetensors", "torchvision", "faster_coco_eval"}


@pytest.fixture(scope="module", autouse=True)
def _without_collections() -> Iterator[None]:
    """Trees of all files are millions of objects, none of which is garbage."""
    gc.disable()
    yield
    gc.enable()


@cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_files_import_from_below_and_from_their_own_folder() -> None:
    for path in FILES:
        _check_imports(path)


def _check_imports(path: Path) -> None:
    room = _room(path)
    layer = LAYERS[room]
    allowed = set().union(*OUTSIDE[: layer + 1]) | sys.stdlib_module_names | {"typing_extensions"}
    for name, in_function, for_types in _imports(path):
        top, *rest = name.split(".")
        if top == "lit_data":
            other = rest[0] if rest else None
            assert other is None or _may_import(room, other), f"{path} must not import {name}"
        elif for_types or (top == "torch" and in_function):
            continue  # torch for annotations anywhere, and inside functions that make tensors
        else:
            drawing = room == "callbacks" and top == "matplotlib" and in_function
            assert top in allowed or drawing, f"{path} must not import {name}"
            assert room in ONLY_HERE.get(top, [room]), f"{path}: {name} belongs elsewhere"
            is_light = top not in INSIDE_FUNCTIONS_ONLY
            assert in_function or is_light, f"{path}: import {name} inside a function"


def test_nothing_outside_of_io_asks_where_a_bank_lies() -> None:
    for path in FILES:
        if _room(path) == "io":
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
        "lit_data.callbacks": {
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
    links = {name: (PACKAGE / name).readlink() for name in ("callbacks", "conf")}
    assert links == {"callbacks": Path("../callbacks"), "conf": Path("../conf")}
    assert not list((PACKAGE.parent / "tests").rglob("__init__.py"))


def _room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def _may_import(room: str, other: str) -> bool:
    if other not in LAYERS:
        return False
    same_room, below = room == other, LAYERS[other] < LAYERS[room]
    facts = LAYERS[room] == LAYERS[other] == 0
    programs = LAYERS[room] == LAYERS[other] == 7
    return same_room or below or facts or programs


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
    for top in ("lit_data", "callbacks", "lit_inspect", "benchmarks"):
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
