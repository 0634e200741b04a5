"""Hydra's engine on the packaged configuration, and what it knows about groups, options and keys."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self, cast

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf
from typing_extensions import override

from lit_data.commands.configuration.names import join_key
from lit_data.errors import ConfigError


@contextmanager
def open_hydra(config_dir: str | Path | None = None) -> Iterator[Hydra]:
    """Hydra on `pkg://lit_data.conf` and the user's folder, as `hydra.main` would set it up; global
    state is put back.

    `hydra.main` itself reads `sys.argv` and turns every error into exit code 1, so its engine is
    used directly.

    Args:
        config_dir: folder of the user's own groups and experiments.

    Raises:
        ConfigError: there is no such folder.
    """
    version.setbase("1.3")
    search_path = create_config_search_path("pkg://lit_data.conf")
    if config_dir is not None:
        folder = Path(config_dir).expanduser().resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {config_dir}: there is no such folder.")
        search_path.prepend(
            provider="command-line",
            path=f"file://{folder}",
            anchor=SearchPathQuery(provider="schema"),
        )
    engine, job = GlobalHydra.instance(), HydraConfig.instance()
    before = engine.hydra, job.cfg
    engine.clear()
    try:
        hydra = Hydra.create_main_hydra2(task_name="lit_data", config_search_path=search_path)
        cast(ConfigLoaderImpl, hydra.config_loader).repository = FilesReadOnce(search_path)
        yield hydra
    finally:
        engine.hydra, job.cfg = before


class FilesReadOnce(ConfigRepository):
    """The files below a search path, each parsed once however often a configuration is composed of them."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        self._read: dict[tuple[object, ...], ConfigResult | None] = {}
        super().__init__(config_search_path)

    def __deepcopy__(self, memo: object) -> Self:
        return copy.copy(
            self
        )  # Hydra gives each composition its own, as it may look for files in other places

    @override
    def load_config(self, config_path: str) -> ConfigResult | None:
        key = (config_path, *((source.provider, source.path) for source in self.sources))
        if key not in self._read:
            self._read[key] = super().load_config(config_path)
        found = self._read[key]
        return found and replace(
            found, config=copy.deepcopy(found.config)
        )  # what is composed takes its nodes away


class ConfigTree:
    """What one command's configuration can be composed from.

    Args:
        hydra: the engine.
        command: name of the primary configuration.
        words: overrides of the command line; those of `hydra.searchpath` decide where groups are
            looked for.
    """

    def __init__(self, hydra: Hydra, command: str, words: Sequence[str]) -> None:
        self._hydra = hydra
        self.command = command
        self._search_words = [
            word for word in words if word.lstrip("+").startswith("hydra.searchpath=")
        ]
        self.base = self.compose([])

    def parse(self, words: Sequence[str]) -> list[Override]:
        """Read overrides.

        Raises:
            ConfigError: one is not in Hydra's grammar.
        """
        parser = OverridesParser.create(config_loader=self._hydra.config_loader)
        parsed = []
        for word in words:
            try:
                parsed += parser.parse_overrides([word])
            except HydraException as error:
                lines = str(error).removeprefix(f"Error parsing override '{word}'\n").splitlines()
                reason = lines[0].removeprefix("LexerNoViableAltException: ")
                quoting = (
                    """; a text that holds = is quoted: 'key="a=b"'"""
                    if word.count("=") > 1
                    else ""
                )
                raise ConfigError(
                    f"cannot read the override '{word}' ({reason}). Write key=value{quoting}."
                ) from error
        return parsed

    def compose(self, words: Sequence[str]) -> DictConfig:
        """The whole configuration with its `hydra` node; raises what Hydra raises."""
        words = [*self._search_words, *(word for word in words if word not in self._search_words)]
        return self._hydra.compose_config(self.command, words, RunMode.RUN, from_shell=False)

    def options(self, group: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
        """Names of the files (or of the groups) below a group; none when there is no such group."""
        loader = self._hydra.config_loader
        return loader.get_group_options(
            group, kind, config_name=self.command, overrides=list(self._search_words)
        )

    def has_option(self, group: str, option: str) -> bool:
        """Whether a group, or a folder within it, holds the file `option`."""
        folder, _, name = f"{group}/{option}".rpartition("/")
        return name.removesuffix(".yaml") in self.options(folder)

    def list_groups(self, parent: str = "") -> list[str]:
        """Every group and group within a group."""
        found = []
        for name in self.options(parent, ObjectType.GROUP):
            group = f"{parent}/{name}" if parent else name
            found += [group, *self.list_groups(group)]
        return found

    def is_group(self, key: str) -> bool:
        """Whether an override of `key` chooses a file of a group."""
        parent, _, name = key.rpartition("/")
        return name in self.options(parent, ObjectType.GROUP)

    def read_files(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Paths of all files that a configuration is made of, and the keys that the last file to
        name them left open.

        OmegaConf keeps an earlier file's value under a later file's `???`, so an experiment that
        asks for `data.root` would run without it.
        """
        loader = cast(ConfigLoaderImpl, self._hydra.config_loader)
        parsed, files = loader._parse_overrides_and_create_caching_repo(self.command, list(words))
        paths, left_open = [], set[str]()
        for default in create_defaults_list(
            files, self.command, parsed, prepend_hydra=True, skip_missing=False
        ).defaults:
            paths.append(str(default.config_path))
            leaves = walk_leaves(loader._load_single_config(default, files).config)
            for key, value in leaves.items():
                (left_open.add if value == "???" else left_open.discard)(key)
        given = [f"{override.key_or_group}." for override in parsed]
        return paths, [
            key for key in sorted(left_open) if not f"{key}.".startswith(("hydra.", *given))
        ]


def list_keys(cfg: Container) -> list[str]:
    """Every dotted key of a configuration, inner nodes included."""
    return [key for key, _ in _walk(cfg)]


def walk_leaves(cfg: Container) -> dict[str, object]:
    """The values of a configuration by their dotted keys, interpolations as typed."""
    return {key: value for key, value in _walk(cfg) if not isinstance(value, Mapping | list)}


def _walk(cfg: Container) -> Iterator[tuple[str, object]]:
    stack: list[tuple[str, object]] = [("", OmegaConf.to_container(cfg, resolve=False))]
    while stack:
        key, value = stack.pop()
        if key:
            yield key, value
        inner = (
            value.items()
            if isinstance(value, Mapping)
            else enumerate(value)
            if isinstance(value, list)
            else ()
        )
        stack += [(join_key(key, name), item) for name, item in inner]
