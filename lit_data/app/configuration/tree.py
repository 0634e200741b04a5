"""Hydra's engine on the packaged configuration: its groups, options and files, and its complaints.

These become one line, with the nearest name.
"""

import copy
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from hydra import initialize_config_module
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode, TaskFunction
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import override
from yaml import YAMLError

from lit_data.app.configuration.installed import list_conf_packages
from lit_data.app.configuration.names import dot_indices, walk
from lit_data.app.configuration.suggest import did_you_mean, nearest, nearest_key
from lit_data.app.configuration.words import parse_word, show_override
from lit_data.core.errors import ConfigError

_LONGEST_SHOWN = 200
PACKAGED_FOLDER = Path(__file__).parents[2] / "conf"
_SEARCH_PATH = "hydra.searchpath"
_UNKNOWN_KEY = re.compile(r"Interpolation key '(.+?)' not found")
_MISSING_VALUE = re.compile(r"Missing mandatory value: (\S+)")
_PLUGINS = {
    "hydra/launcher=joblib": "hydra-joblib-launcher",
    "hydra/launcher=ray": "hydra-ray-launcher",
    "hydra/launcher=submitit_slurm": "hydra-submitit-launcher",
    "hydra/sweeper=optuna": "hydra-optuna-sweeper",
}
"""Options that packages bring along, as plugins of Hydra."""

_folders: ContextVar[tuple[tuple[str, Path], ...]] = ContextVar("folders", default=())
"""Folders of configurations beside ours, with the names of those that bring them."""


class Engine(Protocol):
    """The engine of `hydra.main`, as `GlobalHydra` hands it out."""

    config_loader: Any

    def compose_config(
        self, config_name: str | None, overrides: list[str], run_mode: RunMode
    ) -> DictConfig:
        """Compose a configuration with its `hydra` node."""

    def run(
        self, config_name: str | None, task_function: TaskFunction, overrides: list[str]
    ) -> JobReturn:
        """Compose a configuration, make the run folder and call a function in it."""

    def multirun(
        self, config_name: str | None, task_function: TaskFunction, overrides: list[str]
    ) -> Any:  # noqa: ANN401 - whatever a launcher makes
        """Compose a configuration and call a function for each job of a sweep."""


class ComposedLoader:
    """Loader that hands a configuration to Hydra which is composed already.

    Args:
        loader: Hydra's own, for all else.
        cfg: With its `hydra` node.
    """

    def __init__(self, loader: Any, cfg: DictConfig) -> None:  # noqa: ANN401 - Hydra's ConfigLoader
        self._loader = loader
        self._cfg = cfg

    def load_configuration(self, *_: object, **__: object) -> DictConfig:
        """Return the configuration, whatever is asked for; anew, as Hydra changes what it prints."""
        return copy.deepcopy(self._cfg)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._loader, name)


class Folders(SearchPathPlugin):
    """Adds folders of configurations behind ours, which none of them can replace."""

    @override
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for provider, folder in _folders.get():
            search_path.append(provider, f"file://{folder}")


@contextmanager
def open_hydra(config_dir: str | Path | None = None) -> Iterator[Engine]:
    """Open Hydra on `pkg://lit_data.conf` and the user's folders, as `hydra.main` would.

    Global state is put back.

    `hydra.main` itself reads `sys.argv` and turns every error into exit code 1, so its engine is
    used directly.

    Args:
        config_dir: folder of the user's own groups and experiments.

    Raises:
        ConfigError: there is no such folder, or no such package of an entry point.
    """
    folders = [(installed.package, installed.folder) for installed in list_conf_packages()]
    if config_dir is not None:
        folder = Path(config_dir).expanduser().resolve()
        if not folder.is_dir():
            raise ConfigError(f"--config-dir {config_dir}: there is no such folder.")
        folders.append(("command-line", folder))
    Plugins.instance().register(Folders)
    token = _folders.set(tuple(folders))
    engine = GlobalHydra.instance()
    job = HydraConfig.instance()
    engine_before = engine.hydra
    job_before = job.cfg
    engine.clear()
    try:
        initialize_config_module("lit_data.conf", job_name="lit_data", version_base="1.3")
        assert engine.hydra is not None
        yield engine.hydra
    finally:
        engine.hydra = engine_before
        job.cfg = job_before
        _folders.reset(token)


class ConfigTree:
    """Files and keys that one command's configuration can be composed from.

    Args:
        hydra: the engine.
        command: name of the primary configuration.
        overrides: of the command line; those of `hydra.searchpath` decide where groups are
            looked for.
    """

    def __init__(self, hydra: Engine, command: str, overrides: Sequence[str]) -> None:
        self._hydra = hydra
        self.command = command
        self._search_overrides: list[str] = []
        for line in overrides:
            if line.lstrip("+").startswith(f"{_SEARCH_PATH}="):
                self._search_overrides.append(line)
        self._parsed: dict[str, Override] = {}
        self._options: dict[tuple[str, ObjectType], list[str]] = {}

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
            return f"Write key=value; quote a text with characters such as , = ( [: {quoted}"
        near = nearest(line, self.options("experiment"))
        meant = near and f"experiment={near}"
        if meant is None and Path(line).exists():
            meant = show_override("data.root", line)
        return f"Write key=value.{did_you_mean(meant)}"

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """Return the configuration of files, with its `hydra` node; raises what Hydra raises.

        Args:
            overrides: those that `chooses_file` tells.
        """
        return self._hydra.compose_config(self.command, list(overrides), RunMode.RUN)

    def list_files(self, overrides: Sequence[str]) -> Any:  # noqa: ANN401 - Hydra's DefaultsList
        """Return which files `compose` puts together, in their order; raises what Hydra raises."""
        return self._hydra.config_loader.compute_defaults_list(
            self.command, list(overrides), RunMode.RUN
        )

    def options(self, group: str, kind: ObjectType = ObjectType.CONFIG) -> list[str]:
        """Return names of the files (or groups) below a group; none if there is no such group."""
        key = (group, kind)
        if key not in self._options:
            self._options[key] = self._hydra.config_loader.get_group_options(
                group, kind, config_name=self.command, overrides=self._search_overrides
            )
        return self._options[key]

    def has_option(self, group: str, option: str) -> bool:
        """Return True if a group, or a folder within it, holds the file `option`."""
        folder, _, name = f"{group}/{option}".rpartition("/")
        return name.removesuffix(".yaml") in self.options(folder)

    def has_default(self, group: str) -> bool:
        """Return True if the file that all commands share chooses an option of a group."""
        return f"\n  - {group}: " in (PACKAGED_FOLDER / "base.yaml").read_text("utf-8")

    def list_groups(self, parent: str = "") -> list[str]:
        """Return every group and group within a group."""
        groups = []
        for name in self.options(parent, ObjectType.GROUP):
            group = f"{parent}/{name}" if parent else name
            groups.append(group)
            groups += self.list_groups(group)
        return groups

    def is_group(self, key: str) -> bool:
        """Return True if a key is the name of a group."""
        parent, _, name = key.rpartition("/")
        return name in self.options(parent, ObjectType.GROUP)

    def chooses_file(self, word: Override) -> bool:
        """Return True for an override of a group, or of where groups are looked for."""
        if word.key_or_group == _SEARCH_PATH:
            return True
        return self.is_group(word.key_or_group) and not isinstance(word.value(), dict)


def missing_value(key: str) -> str:
    """Return the line for a key that must be given."""
    return f"'{key}' has no value yet: write {key}=VALUE."


def take_job(cfg: DictConfig) -> DictConfig:
    """Return a configuration without Hydra's node."""
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])


def list_keys(cfg: Container) -> list[str]:
    """Return every dotted key of a configuration, inner nodes included."""
    return [key for key, _ in walk_unresolved(cfg)]


def walk_unresolved(cfg: Container) -> Iterator[tuple[str, object]]:
    """Yield every node and value with its dotted key, interpolations as they are written."""
    for key, value in walk(OmegaConf.to_container(cfg, resolve=False)):
        if key:
            yield dot_indices(key), value


@contextmanager
def as_config_errors(cfg: DictConfig | None = None) -> Iterator[None]:
    """Raise what Hydra and OmegaConf complain about as a `ConfigError` of one line.

    Args:
        cfg: Whose keys are offered for those that are not found.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", r"provider=.*\s+is not available", UserWarning)
            yield
    except ConfigError:
        raise
    except Exception as error:
        # Also what Hydra and OmegaConf raise by mistake: it is the user's text that they read.
        raise ConfigError(_explain(error, cfg)) from error


def _explain(error: Exception, cfg: DictConfig | None) -> str:
    """Return one line for an error of composing or resolving."""
    if isinstance(error, MissingConfigException):
        return _explain_missing_file(error)
    # Hydra wraps the errors of OmegaConf, which know the key.
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    reasons = [str(reason).split("full_key:")[0] for reason in dict.fromkeys((error, cause))]
    text = " ".join(" ".join(reasons).split())
    if match := _MISSING_VALUE.search(text):
        return missing_value(match[1])
    hint = ""
    match = _UNKNOWN_KEY.search(text)
    if match and cfg is not None:
        hint = did_you_mean(nearest_key(match[1], list_keys(cfg)))
    # The text of any other error says little without its type.
    if not isinstance(error, HydraException | OmegaConfBaseException | YAMLError | UserWarning):
        text = f"{type(error).__name__}: {text}"
    key = getattr(cause, "full_key", None)
    if key:
        text = f"'{key}': {text}"
    return f"{text.rstrip('.')}.{hint}"


def unknown_option(option: str, group: str, options: Sequence[str]) -> str:
    """Return the line for an option that a group does not have."""
    line = f"unknown option '{option}' of '{group}'"
    if group == "experiment":
        line = f"unknown experiment '{option}'"
    if package := _PLUGINS.get(f"{group}={option}"):
        return f"'{group}={option}' needs a package: pip install {package}."
    options = [name for name in options if not name.startswith("base")]  # shared by the others
    verb = "is" if len(options) == 1 else "are"
    near = did_you_mean(nearest(option, options))
    return f"{line}.{near} There {verb}: {', '.join(options) or 'none'}."


def _explain_missing_file(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    line = unknown_option(option, group, error.options or [])
    asking = re.match(r"In '(.+?)'", str(error))
    return f"{line} ({asking[1]}.yaml asks for it.)" if asking else line
