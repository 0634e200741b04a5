"""Layouts of target and references in files."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lit_data.core.checks import check_choice
from lit_data.core.errors import ConfigError, DataError, Problems, show_path
from lit_data.core.leftovers import Leftovers
from lit_data.images.decoders import ImageSource
from lit_data.images.discovery import find_images
from lit_inspect.counts import counted
from lit_inspect.layouts import ROLES, find_role

Layout = Literal["channels", "files", "pairs", "single"]


@dataclass(frozen=True, slots=True)
class LayoutRule:
    """Rule of a layout.

    Args:
        roles: Files that make up one image; empty if it is one file.
        stored: Number of channels in the store for each image; None for as many as its file has.
        expand: Stored channel of each of target, ref1 and ref2; None without references.
    """

    roles: tuple[str, ...] = ()
    stored: int | None = None
    expand: tuple[int, int, int] | None = None


LAYOUTS: Mapping[str, LayoutRule] = {
    "channels": LayoutRule((), 3, (0, 1, 2)),
    "files": LayoutRule(ROLES, 3, (0, 1, 2)),
    "pairs": LayoutRule(ROLES[:2], 2, (0, 1, 1)),
    "single": LayoutRule((), 1, (0, 0, 0)),
}


def rule_of(layout: str | None) -> LayoutRule:
    """Return the rule of a layout; without a layout, each image is one file.

    Raises:
        ConfigError: The layout is not one of the four.
    """
    if layout is None:
        return LayoutRule()
    check_choice("layout", layout, get_args(Layout))
    return LAYOUTS[layout]


def find_sources(
    root: Path,
    layout: str | None = None,
    *,
    patterns: Sequence[str] = ("**/*",),
    files: Mapping[str, str] | None = None,
    exclude: Sequence[str] = (),
    masks: Path | None = None,
    leftovers: Leftovers | None = None,
) -> list[ImageSource]:
    """Find the images of a dataset.

    Args:
        root: Folder of the dataset.
        layout: `None`: each image is one file. `channels`: one file has target and references as
            channels. `files`: three files. `pairs`: two files, with the same reference twice.
            `single`: one gray texture stands for all three.
        patterns: Globs below the root, for the layouts of one file.
        files: For `files` and `pairs`, a glob with one ``*`` for each role; files whose ``*``
            matches the same text belong together, for example ``{target: "*_a.tif", ref1:
            "*_b.tif", ref2: "*_c.tif"}``.
        exclude: Globs below the root of files to skip; a folder stands for everything in it.
        masks: Folder whose files are masks instead of images.
        leftovers: Receives files of other types.

    Returns:
        The images in the order of their names.

    Raises:
        ConfigError: The layout is unknown, or `files` does not fit it.
        DataError: The folder is missing or empty, or a file has no partner.
    """
    roles = rule_of(layout).roles
    if roles:
        globs = _check_files(layout, roles, files)
        groups = _match_roles(root, roles, globs, exclude, leftovers)
        return [ImageSource(tuple(map(str, group))) for group in groups]
    sources = []
    listing = find_images(root, patterns=patterns, exclude=exclude, leftovers=leftovers)
    for path in listing.paths:
        if masks is None or not path.is_relative_to(masks):
            sources.append(ImageSource((str(path),)))
    if masks is not None and not sources:
        raise DataError(_describe_no_images(root, masks))
    return sources


def _describe_no_images(root: Path, masks: Path) -> str:
    """Return the message about a folder whose images are all in its folder of masks."""
    if root.is_relative_to(masks):
        return (
            f"data.masks={masks} is the folder of the images itself, so every file would count "
            f"as a mask: move the masks into a folder of their own in {root}, with the names of "
            "their images, and name it in data.masks"
        )
    return f"no images in {root} but masks in {masks}: is data.root the right folder?"


def _check_files(
    layout: str | None, roles: Sequence[str], files: Mapping[str, str] | None
) -> Mapping[str, str]:
    files = files or {}
    if set(files) != set(roles) or any(pattern.count("*") != 1 for pattern in files.values()):
        example = ", ".join(f"{role}: <glob with one *>" for role in roles)
        raise ConfigError(f"layout={layout} needs files={{{example}}}, found {dict(files)}")
    return files


def _match_roles(
    root: Path,
    roles: Sequence[str],
    files: Mapping[str, str],
    exclude: Sequence[str],
    leftovers: Leftovers | None,
) -> list[tuple[Path, ...]]:
    patterns = tuple(files[role] for role in roles)
    # One walk for all roles: folders may be large, or on a network.
    listing = find_images(root, patterns=patterns, exclude=exclude, leftovers=leftovers)
    paths = {Path(os.path.relpath(path, root)).as_posix(): path for path in listing.paths}
    names_of = {role: find_role(files[role], paths) for role in roles}
    # Every key of any role needs one file for each role.
    candidates: dict[str, list[list[Path]]] = {}
    for key in sorted(set().union(*names_of.values())):
        candidates[key] = [[paths[name] for name in names_of[role].get(key, ())] for role in roles]
    _refuse_doubles(root, roles, candidates)
    _refuse_no_partners(root, roles, files, candidates)
    groups = []
    for key, of_roles in candidates.items():
        group = []
        for role, of_role in zip(roles, of_roles, strict=True):
            # A missing file is a bad image, which `on_bad` skips or refuses like any other.
            expected = root / files[role].replace("*", key)
            group.append(of_role[0] if of_role else expected)
        groups.append(tuple(group))
    return groups


def _refuse_doubles(
    root: Path, roles: Sequence[str], candidates: Mapping[str, list[list[Path]]]
) -> None:
    doubles = Problems()
    for of_roles in candidates.values():
        for role, paths in zip(roles, of_roles, strict=True):
            if len(paths) > 1:
                doubles.add(paths[0], f"{role} may be this file or {show_path(paths[1])}")
    folder = show_path(root)
    files = counted(len(doubles), f"file in {folder} matches", f"files in {folder} match")
    doubles.raise_if_any(f"{files} more than one image or role")


def _refuse_no_partners(
    root: Path,
    roles: Sequence[str],
    files: Mapping[str, str],
    candidates: Mapping[str, list[list[Path]]],
) -> None:
    if any(all(of_roles) for of_roles in candidates.values()):
        return
    missing = Problems()
    for key, of_roles in candidates.items():
        for role, paths in zip(roles, of_roles, strict=True):
            if not paths:
                missing.add(files[role].replace("*", key), f"{role} is missing")
    what = (
        f"{counted(len(missing), 'file is', 'files are')} missing in {show_path(root)}, "
        "so no image has all of its files"
    )
    missing.raise_if_any(what)
