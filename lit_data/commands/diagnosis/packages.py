"""Versions: what lit_data asks for, what is known to be bad, and what stands in the way of something else."""

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import metadata
from typing import Final

from packaging.requirements import Requirement
from packaging.version import Version

from lit_data.commands.diagnosis.finding import Finding, judge

SHOWN: Final = ("torch", "lightning", "numpy", "opencv-python-headless", "tifffile", "hydra-core", "kornia")
_MALICIOUS: Final = {"lightning": ("2.6.2", "2.6.3"), "pytorch-lightning": ("2.6.2", "2.6.3")}
_SAME_MODULE: Final = (
    "opencv-python",
    "opencv-python-headless",
    "opencv-contrib-python",
    "opencv-contrib-python-headless",
)


def check_packages() -> Iterator[Finding]:
    """Requirements of lit_data, packages known to be malicious, two packages that write the same files, extras."""
    installed = {name: version for name in SHOWN if (version := find_version(name))}
    yield Finding("ok", "versions", ", ".join(f"{name} {version}" for name, version in installed.items()))
    wanted = [Requirement(text) for text in metadata.requires("lit_data") or []]
    yield judge_requirements([one for one in wanted if one.marker is None or one.marker.evaluate()])
    yield from find_malicious()
    yield judge_opencv([name for name in _SAME_MODULE if find_version(name)])
    yield describe_extras(wanted, metadata.metadata("lit_data").get_all("Provides-Extra") or [])


def judge_requirements(wanted: Sequence[Requirement]) -> Finding:
    """Whether each required package is there in a version that fits."""
    unmet = [f"{one.name}{one.specifier} (found: {find_version(one.name)})" for one in wanted if not is_met(one)]
    found = "; ".join(unmet) or f"all {len(wanted)} met"
    return judge("requirements", found, bad=bool(unmet), level="fault", remedy="pip install -e . in lit_data's folder")


def find_malicious() -> Iterator[Finding]:
    """Uploads known to be malicious, if one is installed."""
    for name, versions in _MALICIOUS.items():
        version = find_version(name)
        if version in versions:
            remedy = f"this upload was malicious: pip install -U {name}, then change what secrets this machine held"
            yield Finding("fault", "security", f"{name} {version}", remedy)


def judge_opencv(found: Sequence[str]) -> Finding:
    """Whether only one package brings ``cv2``: several overwrite each other's files."""
    remedy = f"pip uninstall {' '.join(found)}; pip install opencv-python-headless"
    return judge("OpenCV", ", ".join(found), bad=len(found) > 1, remedy=remedy)


def describe_extras(wanted: Sequence[Requirement], extras: Sequence[str]) -> Finding:
    """Which extras are wholly installed."""
    there: list[str] = []
    missing: list[str] = []
    for extra in sorted(set(extras) - {"dev", "test", "notebooks"}):
        own = [one for one in wanted if one.marker and one.marker.evaluate({"extra": extra})]
        own = [one for one in own if not one.marker.evaluate()]  # type: ignore[union-attr]  # chosen by their marker
        (there if all(map(is_met, own)) else missing).append(extra)
    remedy = f"if you need one: pip install -e '.[{missing[0]}]'" if missing else ""
    return Finding("ok", "extras", f"installed: {_join(there)}; not installed: {_join(missing)}", remedy)


def is_met(requirement: Requirement) -> bool:
    """Whether a package is installed in a version that fits."""
    version = find_version(requirement.name)
    return version is not None and requirement.specifier.contains(Version(version), prereleases=True)


@cache
def find_version(name: str) -> str | None:
    """The installed version of a package, if any."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _join(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
