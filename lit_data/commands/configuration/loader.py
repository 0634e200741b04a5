"""Configuration files: each is parsed once, and each choice of them is composed once.

Those of packages stay as they are while a process runs, those of a user's folders while a command
does. Only what is typed as a value is applied anew.
"""

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Self

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import ConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict
from typing_extensions import override

from lit_data.commands.configuration.foreign import check_config_file


@dataclass(slots=True)
class FileIndex:
    """Places of files and groups.

    Attributes:
        sources: By path and kind; None where there is none.
        options: Names below a group, by group and kind.
    """

    sources: dict[tuple[str, ObjectType], ConfigSource | None] = field(default_factory=dict)
    options: dict[tuple[str, ObjectType | None], list[str]] = field(default_factory=dict)


INDICES: dict[tuple[str, ...], FileIndex] = {}
"""Of packages, by the places in which they are looked for."""
FILES: dict[tuple[str, ...], ConfigResult | None] = {}
"""Parsed files of packages."""
CHOICES: dict[tuple[str | None, ...], DictConfig] = {}
"""Compositions of files of packages, by command, mode and the overrides that choose files."""


class FilesReadOnce(ConfigRepository):
    """Files below a search path, each found and parsed once however often it is composed."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        self._read: dict[tuple[str, ...], ConfigResult | None] = {}
        super().__init__(config_search_path)

    def __deepcopy__(self, memo: object) -> Self:
        # Hydra gives each composition its own, as it may look for files in other places.
        return copy.copy(self)

    @override
    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        super().initialize_sources(config_search_path)
        sources = self.get_sources()
        is_packaged = all(source.scheme() != "file" for source in sources)
        places = tuple(source.full_path() for source in sources)
        self._index = INDICES.setdefault(places, FileIndex()) if is_packaged else FileIndex()

    @override
    def _find_object_source(
        self, config_path: str, object_type: ObjectType | None
    ) -> ConfigSource | None:
        assert object_type is not None
        key = (config_path, object_type)
        sources = self._index.sources
        if key not in sources:
            sources[key] = super()._find_object_source(config_path, object_type)
        return sources[key]

    @override
    def get_group_options(
        self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG
    ) -> list[str]:
        key = (group_name, results_filter)
        options = self._index.options
        if key not in options:
            options[key] = super().get_group_options(group_name, results_filter)
        return list(options[key])

    @override
    def load_config(self, config_path: str) -> ConfigResult | None:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None:
            return None
        # Folders may change while a process runs.
        files = self._read if source.scheme() == "file" else FILES
        key = (config_path, source.provider, source.path)
        if key not in files:
            if source.scheme() == "file":
                check_config_file(Path(source.path) / source._normalize_file_name(config_path))
            files[key] = super().load_config(config_path)
        result = files[key]
        if result is None:
            return None
        # What is composed takes the nodes of its files away. Pickle would be faster, but Hydra
        # imports its plugins again in workers of joblib, whose classes it then refuses.
        return replace(result, config=copy.deepcopy(result.config))


class KeepingLoader(ConfigLoaderImpl):
    """Hydra's loader, which keeps what it composes.

    Args:
        config_search_path: Where files are looked for.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = FilesReadOnce(config_search_path)
        self._choices: dict[tuple[str | None, ...], DictConfig] = {}  # with files of folders

    def __getstate__(self) -> dict[str, object]:
        # Workers of joblib import Hydra's plugins again, whose classes pickle then refuses.
        return {**vars(self), "_choices": {}}

    def reads_folders(self) -> bool:
        """Return True if files may change while the process runs: those of a user."""
        return any(source.scheme() == "file" for source in self.get_sources())

    @override
    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        parsed = [_parse(word) for word in overrides]
        if any(map(_needs_hydra, parsed)):
            return super().load_configuration(
                config_name, overrides, run_mode, from_shell, validate_sweep_overrides
            )
        choosing: list[str] = []
        values: list[Override] = []
        for word in parsed:
            if self._chooses_file(word):
                choosing.append(str(word.input_line))
            else:
                values.append(word)
        cfg = copy.deepcopy(self.read_choices(config_name, choosing, run_mode))
        self._apply_overrides_to_config(values, cfg)
        _describe_run(cfg, parsed)
        return cfg

    def _chooses_file(self, word: Override) -> bool:
        if isinstance(word.value(), dict):
            return False
        return self.repository.group_exists(word.key_or_group)

    def read_choices(
        self, config_name: str | None, overrides: Sequence[str], run_mode: RunMode
    ) -> DictConfig:
        """Return what files give, which others read too: nobody changes it.

        Args:
            config_name: The command.
            overrides: Those that choose files, or the classes of nodes.
            run_mode: Whether options may be left open for a sweep.
        """
        choices = self._choices if self.reads_folders() else CHOICES
        key = (config_name, run_mode.name, *overrides)
        if key not in choices:
            choices[key] = super().load_configuration(config_name, list(overrides), run_mode)
        return choices[key]


@lru_cache(maxsize=1000)
def _parse(word: str) -> Override:
    return OverridesParser.create().parse_overrides([word])[0]


def _needs_hydra(word: Override) -> bool:
    """Return True for a sweep, and for another place of files."""
    return word.is_sweep_override() or word.get_key_element() == "hydra.searchpath"


def _describe_run(cfg: DictConfig, words: Sequence[Override]) -> None:
    """Write into Hydra's node what it says of the words, the folder and the environment."""
    typed: dict[bool, list[str]] = {True: [], False: []}
    task_words = []
    for word in words:
        typed[word.is_hydra_override()].append(str(word.input_line))
        if not word.is_hydra_override():
            task_words.append(word)
    node = cfg.hydra
    node.overrides.hydra, node.overrides.task = typed[True], typed[False]
    node.runtime.cwd = str(Path.cwd())
    with open_dict(node):
        for name in node.job.env_copy:
            node.job.env_set[name] = os.environ[name]
    named = node.job.config.override_dirname
    node.job.override_dirname = get_overrides_dirname(
        task_words, named.exclude_keys, named.item_sep, named.kv_sep
    )
