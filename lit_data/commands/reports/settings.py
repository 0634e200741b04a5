"""The configuration of a run, as Hydra left it in the run folder."""

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
    """What a run was told, without secrets.

    Attributes:
        config: The configuration with references within it filled in. Environment variables stay as
            they were written: their values now need not be those of then.
        overrides: The words of the command line.
        choices: The option chosen of each group.
        command_line: What would start the run again.
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
    config, hydra = (
        _read_yaml(folder / ".hydra" / name, notes) for name in ("config.yaml", "hydra.yaml")
    )
    hydra = as_dict(hydra.get("hydra"))
    words = as_dict(hydra.get("overrides")).get("task")
    overrides = [str(word) for word in words] if isinstance(words, list) else []
    masker.mask_tree(
        config
    )  # learn before anything is shown: the same secret may stand in a reference or an override
    resolver = _Resolver(config, hydra)
    resolved = {key: resolver.resolve(value, _DEEPEST) for key, value in config.items()}
    masked = tuple(map(masker.mask_text, overrides))
    choices = {
        str(k): str(v) for k, v in as_dict(as_dict(hydra.get("runtime")).get("choices")).items()
    }
    command = [
        "python",
        "-m",
        "lit_data",
        str(config.get("command", "fit")),
        *find_config_dir(hydra),
    ]
    line = shlex.join([*map(masker.mask_text, command), *masked])
    return Settings(
        masker.mask_tree(resolved), masked, choices, line if overrides or config else ""
    )


def flatten(tree: Any, above: str = "") -> dict[str, Any]:  # noqa: ANN401 - what YAML may hold
    """The leaves of a configuration by their dotted keys; a list is a leaf."""
    if not isinstance(tree, Mapping):
        return {above: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{above}.{key}" if above else str(key))
    return leaves


def write_yaml(tree: Any) -> str:  # noqa: ANN401
    """A configuration as text."""
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100) if tree else ""


def _read_yaml(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        found = parse_yaml(read_text(path.parents[1], path))
    except FileNotFoundError:
        notes.append(
            f"there is no {path.parent.name}/{path.name}, so the configuration is not known"
        )
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        notes.append(f"{path.parent.name}/{path.name} cannot be read: {str(error).splitlines()[0]}")
    else:
        return as_dict(found)
    return {}


def find_config_dir(hydra: Mapping[str, Any]) -> list[str]:
    """The options of the command line that name the user's own folders of configurations."""
    sources = as_dict(hydra.get("runtime")).get("config_sources")
    entries = [as_dict(entry) for entry in sources] if isinstance(sources, list) else []
    return [
        word
        for entry in entries
        if entry.get("schema") == "file" and entry.get("path")
        for word in ("--config-dir", str(entry["path"]))
    ]


class _Resolver:
    """Fills references in, as many as a configuration of ours has: a hostile one may refer to itself ten times over."""

    def __init__(self, config: Mapping[str, Any], hydra: Mapping[str, Any]) -> None:
        self._config, self._hydra, self._left = config, hydra, _MOST_REFERENCES

    def resolve(self, value: Any, depth: int) -> Any:  # noqa: ANN401
        """A value with its references filled in, to some depth."""
        if isinstance(value, dict):
            return {key: self.resolve(part, depth) for key, part in value.items()}
        if isinstance(value, list):
            return [self.resolve(part, depth) for part in value]
        if (
            not isinstance(value, str)
            or not depth
            or "${" not in value
            or len(value) > _MOST_CHARACTERS
        ):
            return value
        whole = _REFERENCE.fullmatch(value)
        target = self._look_up(whole[1]) if whole else None
        if target is not None:
            return self.resolve(target, depth - 1)
        return _REFERENCE.sub(lambda found: self._fill(found, depth - 1), value)

    def _fill(self, found: re.Match[str], depth: int) -> str:
        target = self._look_up(found[1])
        plain = found[0] if isinstance(target, dict | list) or target is None else str(target)
        return str(self.resolve(plain, depth))[:_MOST_CHARACTERS]

    def _look_up(self, key: str) -> Any:  # noqa: ANN401
        self._left -= 1
        return _select(key, self._config, self._hydra) if self._left > 0 else None


def _select(key: str, config: Mapping[str, Any], hydra: Mapping[str, Any]) -> Any:  # noqa: ANN401
    node: Any = hydra if key.startswith("hydra:") else config
    for part in key.removeprefix("hydra:").split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def as_dict(node: Any) -> dict[str, Any]:  # noqa: ANN401
    """A node of YAML that is a mapping; an empty one for any other."""
    return node if isinstance(node, dict) else {}
