"""Hydra's engine on the packaged configuration: its groups, options and keys."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from hydra import version
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
from hydra.types import RunMode
from omegaconf import Container, DictConfig, OmegaConf

from lit_data.commands.configuration.installed import list_conf_packages
from lit_data.commands.configuration.loader import KeepingLoader
from lit_data.commands.configuration.names import dot_indices, walk
from lit_data.commands.configuration.suggest import did_you_mean, nearest
from lit_data.commands.configuration.words import parse_word, show_override
from lit_data.errors import ConfigError

_LONGEST_SHOWN = 200
_PACKAGED_FOLDER = Path(__file__).parents[2] / "conf"

PACKAGED_LISTS: dict[tuple[str, ...], tuple[list[str], set[str]]] = {}
"""Paths of files of packages with the keys that they leave open, by command and choosing words."""


@contextmanager
def open_hydra(config_dir: str | Path | None = None) -> Iterator[Hydra]:
    """Open Hydra on `pkg://lit_data.conf` and the user's folders, as `hydra.main` would.

    Global state is put back.

    `hydra.main` itself reads `sys.argv` and turns every error into exit code 1, so its engine is
    used directly.

    Args:
        config_dir: folder of the user's own groups and experiments.

    Raises:
        ConfigError: there is no such folder, or no such package of an entry point.
    """
    version.setbase("1.3")  # Hydra warns of a base that is not set
    search_path = create_config_search_path("pkg://lit_data.conf")
    for installed in list_conf_packages():  # behind ours, which none of them can replace
        _add_folder(search_path, installed.package, installed.folder)
    if config_dir is not None:
        folder = Path(config_dir).expanduser().resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {config_dir}: there is no such folder.")
        _add_folder(search_path, "command-line", folder)
    engine = GlobalHydra.instance()
    job = HydraConfig.instance()
    engine_before = engine.hydra
    job_before = job.cfg
    engine.clear()
    try:
        hydra = Hydra.create_main_hydra2(task_name="lit_data", config_search_path=search_path)
        hydra.config_loader = KeepingLoader(search_path)
        yield hydra
    finally:
        engine.hydra = engine_before
        job.cfg = job_before


def _add_folder(search_path: ConfigSearchPath, provider: str, folder: Path) -> None:
    """Add a folder behind those that are there; Hydra's schemas stay last."""
    before_schemas = SearchPathQuery(provider="schema")
    search_path.prepend(provider=provider, path=f"file://{folder}", anchor=before_schemas)


class ConfigTree:
    """Files and keys that one command's configuration can be composed from.

    Args:
        hydra: the engine.
        command: name of the primary configuration.
        overrides: of the command line; those of `hydra.searchpath` decide where groups are
            looked for.
    """

    def __init__(self, hydra: Hydra, command: str, overrides: Sequence[str]) -> None:
        self._hydra = hydra
        self.command = command
        self._search_overrides: list[str] = []
        for line in overrides:
            if line.lstrip("+").startswith("hydra.searchpath="):
                self._search_overrides.append(line)
        self._parsed: dict[str, Override] = {}
        self.base = self.read_choices([])

    @property
    def _loader(self) -> KeepingLoader:
        return cast(KeepingLoader, self._hydra.config_loader)

    def parse(self, overrides: Sequence[str]) -> list[Override]:
        """Read overrides.

        Raises:
            ConfigError: one is not in Hydra's grammar.
        """
        parser = OverridesParser.create(config_loader=self._hydra.config_loader)
        parsed = []
        for line in overrides:
            try:
                if line not in self._parsed:
                    self._parsed[line] = parse_word(parser, line)
                parsed.append(self._parsed[line])
            except (HydraException, ValueError, RecursionError) as error:
                lines = str(error).removeprefix(f"Error parsing override '{line}'\n").splitlines()
                reason = "".join(lines[:1]).removeprefix("LexerNoViableAltException: ")
                raise ConfigError(
                    f"cannot read the override '{line:.200}' ({reason:.200}). {self._correct(line)}"
                ) from error
        return parsed

    def _correct(self, line: str) -> str:
        """Return what may have been meant by a word that cannot be read."""
        key, equals, value = line.partition("=")
        if equals and value:
            quoted = show_override(key, value)
            if len(quoted) > _LONGEST_SHOWN:
                quoted = f"{key:.{_LONGEST_SHOWN}}='...'"
            return f"Write key=value; a text with signs such as , = ( [ is quoted: {quoted}"
        experiments = self.options("experiment")
        near = line if line in experiments else nearest(line, experiments)
        hint = did_you_mean(near and f"+experiment={near}")
        return f"Write key=value.{hint}"

    def read_choices(self, overrides: Sequence[str]) -> DictConfig:
        """Return what `compose` does for words that choose files and classes; nobody changes it."""
        if self._search_overrides:
            return self.compose(overrides)
        return self._loader.read_choices(self.command, overrides, RunMode.RUN)

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the whole configuration with its `hydra` node; raises what Hydra raises."""
        # Hydra looks for groups where the overrides in front say.
        others = [line for line in overrides if line not in self._search_overrides]
        overrides = [*self._search_overrides, *others]
        return self._hydra.compose_config(self.command, overrides, RunMode.RUN, from_shell=False)

    def options(self, group: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
        """Return names of the files (or groups) below a group; none if there is no such group."""
        loader = self._hydra.config_loader
        return loader.get_group_options(
            group, kind, config_name=self.command, overrides=list(self._search_overrides)
        )

    def has_option(self, group: str, option: str) -> bool:
        """Return True if a group, or a folder within it, holds the file `option`."""
        folder, _, name = f"{group}/{option}".rpartition("/")
        return name.removesuffix(".yaml") in self.options(folder)

    def list_groups(self, parent: str = "") -> list[str]:
        """Return every group and group within a group."""
        groups = []
        for name in self.options(parent, ObjectType.GROUP):
            group = f"{parent}/{name}" if parent else name
            groups.append(group)
            groups += self.list_groups(group)
        return groups

    def is_group(self, key: str) -> bool:
        """Return True if an override of `key` chooses a file of a group."""
        parent, _, name = key.rpartition("/")
        return name in self.options(parent, ObjectType.GROUP)

    def read_files(self, overrides: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return paths of all files of a configuration, and keys that the last file left open.

        OmegaConf keeps an earlier file's value under a later file's `???`, so an experiment that
        asks for `data.root` would run without it.
        """
        parsed = self.parse(overrides)
        choosing = []
        for word in parsed:
            if "." not in word.key_or_group and self.is_group(word.key_or_group):
                choosing.append(str(word.input_line))
        key = (self.command, *choosing)
        if self._reads_folders():
            paths, left_open = self._list_files(overrides)
        else:
            if key not in PACKAGED_LISTS:
                PACKAGED_LISTS[key] = self._list_files(choosing)
            paths, left_open = PACKAGED_LISTS[key]
        closed = ("hydra.", *(f"{word.key_or_group}." for word in parsed))
        return paths, [key for key in sorted(left_open) if not f"{key}.".startswith(closed)]

    def _list_files(self, overrides: Sequence[str]) -> tuple[list[str], set[str]]:
        """Return paths of the files that overrides choose, and keys that the last file left open."""
        loader = self._loader
        parsed, files = loader._parse_overrides_and_create_caching_repo(
            self.command, list(overrides)
        )
        defaults = create_defaults_list(
            files, self.command, parsed, prepend_hydra=True, skip_missing=False
        ).defaults
        paths = []
        left_open = set()
        for default in defaults:
            paths.append(str(default.config_path))
            if default.config_path == "hydra/config":
                continue  # the largest by far, and all of it stands below hydra
            content = loader._load_single_config(default, files).config
            for key, value in _walk(content):
                if value == "???":
                    left_open.add(key)
                elif not isinstance(value, Mapping | list):
                    left_open.discard(key)
        return paths, left_open

    def _reads_folders(self) -> bool:
        """Return True if files may change while the process runs: those of a user."""
        return bool(self._search_overrides) or self._loader.reads_folders()


def check_shadowing(cfg: DictConfig) -> None:
    """Refuse a user's file that has the name of a packaged one.

    Args:
        cfg: The composed configuration with Hydra's node.

    Raises:
        ConfigError: There is one.
    """
    sources = cfg.hydra.runtime.config_sources
    folders = [Path(source.path) for source in sources if source.schema == "file"]
    for folder in folders:
        for packaged in _PACKAGED_FOLDER.rglob("*.yaml"):
            path = folder / packaged.relative_to(_PACKAGED_FOLDER)
            if path.is_file() and not path.samefile(packaged):
                raise ConfigError(
                    f"{path} would never be read, for lit_data has a file of that name: rename "
                    "yours."
                )


def list_keys(cfg: Container) -> list[str]:
    """Return every dotted key of a configuration, inner nodes included."""
    return [key for key, _ in _walk(cfg)]


def _walk(cfg: Container) -> Iterator[tuple[str, object]]:
    for key, value in walk(OmegaConf.to_container(cfg, resolve=False)):
        if key:
            yield dot_indices(key), value
