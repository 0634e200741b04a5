"""Compiles ``guard.cpp`` for the installed torch and loads it; this must happen before torch is imported."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

TORCH = "2.13"
"""The release whose C++ interface the source is written for."""


class UnavailableError(Exception):
    """No simulated device can be had here; the text says why."""


def load() -> ctypes.CDLL:
    """The library, registered with torch's core libraries.

    Raises:
        UnavailableError: torch is another release, a CUDA build or imported already, or there is no
            g++.
    """
    spec, found = find_spec("torch"), version("torch")
    if not found.startswith(f"{TORCH}."):
        raise UnavailableError(
            f"the simulated device is written for torch {TORCH}, this is {found}"
        )
    if "torch" in sys.modules:
        raise UnavailableError("torch is imported already: give -p tests.simulated.plugin")
    home = Path(spec.origin).parent
    if (home / "lib" / "libtorch_cuda.so").exists():
        raise UnavailableError("this torch is built with CUDA")
    if shutil.which("g++") is None:
        raise UnavailableError("no g++ to compile it")
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(home / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(_compile(home, found)), mode=ctypes.RTLD_GLOBAL)
    library.sim_register.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    library.sim_unregister.argtypes = [ctypes.c_size_t]
    library.sim_install()
    return library


def _compile(home: Path, found: str) -> Path:
    """The compiled source, which is kept for as long as source and torch stay the same."""
    source = Path(__file__).with_name("guard.cpp")
    key = hashlib.sha256(
        b"|".join((source.read_bytes(), found.encode(), os.fsencode(home)))
    ).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"lit_data-simulated-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise UnavailableError(f"{folder} belongs to somebody else")
    target = folder / f"{key}.so"
    if not target.exists():
        part = target.with_suffix(f".{os.getpid()}")
        places = [f"-I{home / 'include'}", f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
        words = [
            "g++",
            "-O1",
            "-std=c++20",
            "-fPIC",
            "-shared",
            str(source),
            "-o",
            str(part),
            *places,
        ]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnavailableError(f"g++ fails: {done.stderr.strip()[:300]}")
        part.replace(target)
    return target
