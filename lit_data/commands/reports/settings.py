"""Configuration of a run, as Hydra left it in the run folder."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from lit_data.commands.reports.untrusted import Masker, parse_yaml, read_text

_REFERENCE: Final = re.compile(r"\$\{([\w.]+|hydra:[\w.]+)\}")
_DEEPEST: Final = 8
_MOST_REFERENCES: Final = 5_000
_MOST_CHARACTERS: Final = 10_000


@dataclass(frozen=True)
class Settings:
    """Configuration and command line of a run, without secrets.

    Attributes:
        config: The configuration with references within it filled in. Environment variables stay as
            they were written: their values now need not be those of then.
        overrides: Of the command line.
        choices: The option chosen of each group.
        command_line: The one that would start the run again.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)
    command_line: str = ""


def read_settings(folder: Path, masker: Masker, notes: list[str]) -> Settings:
    """Read ``.hydra``; what is missing or damaged is noted and left empty.

    Args:
        folder: Of the run.
        masker: It learns the secrets of this run.
        notes: Gets a sentence for each file that cannot be used.
    """
    config = _read_yaml(folder / ".hydra" / "config.yaml", notes)
    hydra = as_dict(_read_yaml(folder / ".hydra" / "hydra.yaml", notes).get("hydra"))
    # Learn before anything is shown: the same secret may stand in a reference or an override.
    masker.mask_tree(config)
    resolver = _Resolver(config, hydra)
    resolved = {key: resolver.resolve(value, _DEEPEST) for key, value in config.items()}
    overrides = _read_overrides(hydra, masker)
    choices = as_dict(as_dict(hydra.get("runtime")).get("choices"))
    line = ""
    if overrides or config:
        command = str(config.get("command", "fit"))
        start = ["python", "-m", "lit_data", command, *find_config_dir(hydra)]
        line = shlex.join([*map(masker.mask_text, start), *overrides])
    return Settings(
        config=masker.mask_tree(resolved),
        overrides=overrides,
        choices={str(group): str(option) for group, option in choices.items()},
        command_line=line,
    )


def _read_overrides(hydra: Mapping[str, Any], masker: Masker) -> tuple[str, ...]:
    words = as_dict(hydra.get("overrides")).get("task")
    if not isinstance(words, list):
        return ()
    return tuple(masker.mask_text(str(word)) for word in words)


def flatten(tree: Any, above: str = "") -> dict[str, Any]:  # noqa: ANN401 - what YAML may hold
    """Return the leaves of a configuration by their dotted keys; a list is a leaf."""
    if not isinstance(tree, Mapping):
        return {above: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{above}.{key}" if above else str(key))
    return leaves


def write_yaml(tree: Any) -> str:  # noqa: ANN401
    """Return a configuration as text."""
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100) if tree else ""


def _read_yaml(path: Path, notes: list[str]) -> dict[str, Any]:
    name = f"{path.parent.name}/{path.name}"
    try:
        return as_dict(parse_yaml(read_text(path.parents[1], path)))
    except FileNotFoundError:
        notes.append(f"there is no {name}, so the configuration is not known")
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        notes.append(f"{name} cannot be read: {str(error).splitlines()[0]}")
    return {}


def find_config_dir(hydra: Mapping[str, Any]) -> list[str]:
    """Return the options of the command line that name the user's own folders of configurations."""
    sources = as_dict(hydra.get("runtime")).get("config_sources")
    options: list[str] = []
    for source in sources if isinstance(sources, list) else ():
        entry = as_dict(source)
        if entry.get("schema") == "file" and entry.get("path"):
            options += ["--config-dir", str(entry["path"])]
    return options


class _Resolver:
    """Fills references in, as many as a configuration of ours has.

    A hostile one may refer to itself ten times over. OmegaConf would also ask the environment.
    """

    def __init__(self, config: Mapping[str, Any], hydra: Mapping[str, Any]) -> None:
        self._config = config
        self._hydra = hydra
        self._left = _MOST_REFERENCES

    def resolve(self, value: Any, depth: int) -> Any:  # noqa: ANN401
        """Return a value with its references filled in, to some depth."""
        if isinstance(value, dict):
            return {key: self.resolve(part, depth) for key, part in value.items()}
        if isinstance(value, list):
            return [self.resolve(part, depth) for part in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if not depth or len(value) > _MOST_CHARACTERS:
            return value  # it refers to itself, or grows without end
        reference = _REFERENCE.fullmatch(value)  # which may stand for a number or a node
        target = self._look_up(reference[1]) if reference else None
        if target is not None:
            return self.resolve(target, depth - 1)
        return _REFERENCE.sub(lambda match: self._fill(match, depth - 1), value)

    def _fill(self, reference: re.Match[str], depth: int) -> str:
        target = self._look_up(reference[1])
        if target is None or isinstance(target, dict | list):
            return reference[0]
        return str(self.resolve(str(target), depth))[:_MOST_CHARACTERS]

    def _look_up(self, key: str) -> Any:  # noqa: ANN401
        self._left -= 1
        if self._left <= 0:
            return None
        node: Any = self._hydra if key.startswith("hydra:") else self._config
        for part in key.removeprefix("hydra:").split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node


def as_dict(node: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a node of YAML that is a mapping; an empty one for any other."""
    return node if isinstance(node, dict) else {}
