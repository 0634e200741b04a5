"""The wheel holds lit_data and nothing else, with the linked folders as real files."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import lit_data
from lit_data.io.wheels import DEFAULT_SIZE, WHEELS

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow  # builds a wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that was built of it."""
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, because setuptools leaves `build/` and metadata beside the sources.
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    source = folder / "source"
    for name in tracked:
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation"]
    command += ["--outdir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel_names(built: Path) -> list[str]:
    return zipfile.ZipFile(next(built.glob("*.whl"))).namelist()


def test_one_version_is_stated(built: Path) -> None:
    version = lit_data.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    names = {path.name for path in built.iterdir() if path.is_file()}
    stem = f"lit_data_inspect-{version}"
    assert names == {f"{stem}.tar.gz", f"{stem}-py3-none-any.whl"}


@pytest.mark.timeout(300)
def test_the_wheel_runs_outside_the_checkout(built: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(next(built.glob("*.whl")))], check=True)
    environment = os.environ | {"PYTHONPATH": str(site), "LIT_DATA_CACHE": str(tmp_path / "cache")}

    def run(*words: str) -> str:
        options = {"cwd": tmp_path, "env": environment, "text": True}
        done = subprocess.run([sys.executable, *words], capture_output=True, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("-c", "import lit_data; print(lit_data.__file__)").startswith(str(site))
    assert "fit" in run(str(site / "bin" / "lit-data"), "--help")
    toy = ["data.samples={count: 8, height_px: 128, width_px: 112}", "data.patch_px=32"]
    toy.append("model.net.width=4")
    run("-m", "lit_data", "fit", "+experiment=stripe", *toy, "trainer.max_epochs=1", "trainer=cpu")
    assert list((tmp_path / "runs" / "fit" / "stripe").glob("*/summary.json"))


def test_only_lit_data_is_importable(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lit_data"}


def test_the_source_distribution_holds_the_package_alone(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = [Path(name).parts[1:] for name in archive.getnames()]
    tops = {parts[0] for parts in names if len(parts) > 1}
    assert tops == {"lit_data", "lit_data_inspect.egg-info"}


def test_weights_come_with_the_wheel(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        required = message_from_bytes(wheel.read(name)).get_all("Requires-Dist") or []
    assert f"{WHEELS[DEFAULT_SIZE].distribution}==0.1.0" in required


def test_code_and_configuration_are_complete(wheel_names: list[str]) -> None:
    for folder in ("callbacks", "conf"):
        expected = {
            f"lit_data/{path.relative_to(ROOT).as_posix()}"
            for path in (ROOT / folder).rglob("*")
            if path.suffix in {".py", ".yaml"}
        }
        assert expected <= set(wheel_names)
        assert expected
    assert "lit_data/py.typed" in wheel_names


def test_the_description_leads_nowhere_inside_the_repository(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(wheel.read(name))
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = str(metadata.get_payload())
    assert re.findall(r"!?\[[^\]]*\]\(([^)]*)\)", text) == ["https://lightning.ai"]
    assert "# lit_data\n" in text  # and all of README but its picture: links became their texts
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#+ .*$", readme, re.MULTILINE)
    assert re.findall(r"^#+ .*$", text, re.MULTILINE) == headings
    assert text.count("|") == readme.count("|")
