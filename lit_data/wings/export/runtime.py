"""The wheel of `lit_inspect`, made from the installed files."""

import base64
import hashlib
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_data.core.files import replacing


def write_runtime(folder: Path) -> Path:
    """Write a wheel of `lit_inspect` for machines without lit_data; return its path.

    Raises:
        OSError: The wheel cannot be written.
    """
    import lit_inspect
    from lit_inspect.version import VERSION

    source = Path(lit_inspect.__file__).parent
    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    parts = {f"lit_inspect/{path.name}": path.read_bytes() for path in sorted(source.glob("*.py"))}
    parts["lit_inspect/py.typed"] = b""
    info = f"lit_inspect-{VERSION}.dist-info"
    for name, text in _describe(project, VERSION).items():
        parts[f"{info}/{name}"] = text.encode()
    record = "".join(_list_part(name, data) for name, data in parts.items())
    parts[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    path = folder / f"lit_inspect-{VERSION}-py3-none-any.whl"
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in parts.items():
            # ZipInfo has a fixed date, so that equal files make equal wheels.
            wheel.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return path


def _describe(project: Mapping[str, Any], version: str) -> dict[str, str]:
    """Return the metadata files of a wheel, which pip reads."""
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {version}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        f"Requires-Python: {project['requires-python']}",
    ]
    lines += [f"Requires-Dist: {needed}" for needed in project["dependencies"]]
    scripts = [f"{name} = {target}" for name, target in project["scripts"].items()]
    wheel = (
        "Wheel-Version: 1.0",
        "Generator: lit_data",
        "Root-Is-Purelib: true",
        "Tag: py3-none-any",
    )
    return {
        "METADATA": "\n".join(lines) + "\n",
        "WHEEL": "\n".join(wheel) + "\n",
        "entry_points.txt": "\n".join(("[console_scripts]", *scripts)) + "\n",
    }


def _list_part(name: str, data: bytes) -> str:
    """Return the line of a part in a RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"
