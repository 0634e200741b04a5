"""The wheel holds lit_data and its runtime and nothing else, all of it as real files."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import numpy
import pytest

import lit_data

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow  # builds a wheel


def copy_sources(folder: Path) -> None:
    """Copy what git knows, because setuptools leaves `build/` and metadata beside the sources."""
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in tracked:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).is_file():
            target.write_bytes((ROOT / name).read_bytes())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that was built of it."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    copy_sources(source)
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

    for package in ("lit_data", "lit_inspect"):
        path = run("-c", f"import {package}; print({package}.__file__)")
        assert path.startswith(str(site))
    assert "fit" in run(str(site / "bin" / "lit-data"), "--help")
    assert ".inspect" in run(str(site / "bin" / "lit-inspect"), "--help")
    toy = ["data.samples={count: 8, height_px: 128, width_px: 112}", "data.patch_px=32"]
    toy.append("model.net.width=4")
    run("-m", "lit_data", "fit", "+experiment=stripe", *toy, "trainer.max_epochs=1", "trainer=cpu")
    assert list((tmp_path / "runs" / "fit" / "stripe").glob("*/summary.json"))


def test_lit_data_and_its_runtime_alone_are_importable(wheel_names: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"lit_data", "lit_inspect"}
    modules = {f"lit_inspect/{path.name}" for path in (ROOT / "lit_inspect").glob("*.py")}
    of_runtime = {name for name in wheel_names if name.startswith("lit_inspect/")}
    assert of_runtime == modules | {"lit_inspect/py.typed", "lit_inspect/pyproject.toml"}


def test_an_editable_checkout_brings_the_runtime_too(tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    source = tmp_path / "source"
    copy_sources(source)
    subprocess.run([*pip, "--target", str(site), "-e", str(source)], check=True, timeout=200)
    code = "import site, sys; site.addsitedir(sys.argv[1]); sys.path.append(sys.argv[2]); "
    code += "import lit_inspect.tiles as t, lit_data as d; print(t.__file__, d.__file__, sep='\\n')"
    # Without the site of this interpreter, which may know another checkout.
    words = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        code,
        str(site),
        str(Path(numpy.__file__).parents[1]),
    ]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(f"{source}/") for line in done.stdout.splitlines()), done.stdout


def test_the_source_distribution_holds_the_packages_alone(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        # Windows, and archives that are unpacked with care, know no links.
        assert all(member.isreg() or member.isdir() for member in archive.getmembers())
        names = [Path(name).parts[1:] for name in archive.getnames()]
    tops = {parts[0] for parts in names if len(parts) > 1}
    assert tops == {"lit_data", "lit_inspect", "lit_data_inspect.egg-info"}


def test_code_and_configuration_are_complete(wheel_names: list[str]) -> None:
    for folder in ("callbacks", "conf"):
        expected = {
            path.relative_to(ROOT).as_posix()
            for path in (ROOT / "lit_data" / folder).rglob("*")
            if path.suffix in {".py", ".yaml"}
        }
        assert expected <= set(wheel_names)
        assert expected
    assert "lit_data/py.typed" in wheel_names
    kind = ROOT / "lit_data" / "conf" / "new_kind"
    files = [path.relative_to(ROOT).as_posix() for path in kind.rglob("*.t[ox]*")]
    assert len(files) == 2
    assert set(files) <= set(wheel_names)


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
