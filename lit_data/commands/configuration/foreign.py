"""Configuration files that may be anybody's: measured before OmegaConf reads and resolves them.

A few lines of ``${a}${a}`` stand for any length of text, and ``${oc.env:NAME}`` reads the
environment of whoever runs the file.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.base import Container
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException
from yaml import ScalarEvent, YAMLError

from lit_data.errors import ConfigError, DataError, escape, first_line, show_path
from lit_data.io.plain import check_number, measure_yaml
from lit_data.io.remote.secrets import WHERE_CREDENTIALS_BELONG, cut_secrets, names_secret
from lit_data.io.source import decode_text, read_within

_MOST_BYTES = 2**20
_MOST_REFERENCES = 3_000
_MOST_LETTERS = 2**22
_LONGEST = 10_000
_DEEPEST = 12
_LETTERS_OF_ONE = 16  # that take as long to read as a reference does
_MARK = re.compile(r"\$\{|\}")
_VARIABLE = "oc.env"
_TYPED = "job.override_dirname"  # repeats the command line


class ForeignError(InterpolationResolutionError):
    """A reference of a configuration that is not followed."""


def check_config_file(path: Path) -> None:
    """Refuse a configuration file that stands for too much, before OmegaConf reads it.

    Raises:
        ConfigError: Names the file, and says what is wrong with it.
    """
    try:
        for event in measure_yaml(decode_text(read_within(path, _MOST_BYTES))):
            if isinstance(event, ScalarEvent):
                check_number(event)
                _check_references(event.value)
    except DataError as error:
        text = str(error).removeprefix(f"{show_path(path)}: ")
        raise ConfigError(f"{show_path(path)}: {text}") from error
    except YAMLError:
        return  # whoever reads it next says what is wrong, and where


def _check_references(text: str) -> None:
    """Refuse a text whose references take long to find: OmegaConf's grammar is slow where they nest."""
    if "${" not in text:
        return
    depth = deepest = 0
    for mark in _MARK.findall(text):
        depth = max(0, depth + (1 if mark == "${" else -1))
        deepest = max(deepest, depth)
    if len(text) > _LONGEST or deepest > _DEEPEST:
        raise DataError(
            f"the text {escape(text[:40])!r}... refers to other keys, for which it is too long or "
            f"nested too deeply: up to {_LONGEST} letters and {_DEEPEST} levels are allowed"
        )


def load_config(path: Path) -> DictConfig:
    """Return the configuration that a run folder holds.

    Raises:
        ConfigError: It cannot be read, stands for too much, or reads a secret of the environment.
    """
    check_config_file(path)
    try:
        cfg = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{show_path(path)} cannot be read: {reason}") from error
    if not isinstance(cfg, DictConfig):
        raise ConfigError(f"{show_path(path)} holds no keys, as the configuration of a run does")
    with bounding_references():
        _follow_all(cfg, path)
    return cfg


def _follow_all(cfg: DictConfig, path: Path) -> None:
    """Resolve each key, as far as that is possible outside of the run."""
    for key in cfg:
        try:
            node = OmegaConf.masked_copy(cfg, [str(key)])
            node._set_parent(cfg)
            OmegaConf.to_container(node, resolve=True)
        except ForeignError as error:
            raise ConfigError(f"{show_path(path)}: {first_line(error)}") from error
        except OmegaConfBaseException:
            continue


@contextmanager
def bounding_references(typed: Collection[str] = ()) -> Iterator[None]:
    """Bound what references of configurations come to while the block runs.

    Args:
        typed: Keys of the command line, which may read any variable of the environment.

    Raises:
        ForeignError: In the block: there are too many references, they come to too much text, or a
            file reads a secret of the environment.
    """
    resolve, variable = Container.resolve_parse_tree, BaseContainer._resolvers[_VARIABLE]
    budget = _Budget()

    def resolve_within(self: Container, parse_tree: Any, node: Node, **options: Any) -> Any:  # noqa: ANN401 - as OmegaConf has them
        budget.take_source(node)
        resolved = resolve(self, parse_tree, node, **options)
        budget.take_result(resolved, node)
        return resolved

    def read_variable(*arguments: Any) -> Any:  # noqa: ANN401 - as OmegaConf has them
        _, _, node, names, _ = arguments
        value = variable(*arguments)
        _check_variable(str(names[0]), value, node, typed)
        return value

    Container.resolve_parse_tree = resolve_within  # type: ignore[method-assign, assignment]
    BaseContainer._resolvers[_VARIABLE] = read_variable
    try:
        yield
    finally:
        Container.resolve_parse_tree = resolve  # type: ignore[method-assign]
        BaseContainer._resolvers[_VARIABLE] = variable


@dataclass
class _Budget:
    """References and letters that are still allowed."""

    references: int = _MOST_REFERENCES
    letters: int = _MOST_LETTERS

    def take_source(self, node: Node) -> None:
        """Count a text that refers to something."""
        source = str(node._value())
        self.references -= 1 + source.count("${") + len(source) // _LETTERS_OF_ONE
        self._check(node)

    def take_result(self, result: object, node: Node) -> None:
        """Count what a text has come to; a part of the configuration by the values in it."""
        content = result._value() if isinstance(result, Node) else result
        if isinstance(content, str):
            self.letters -= len(content)
        elif isinstance(content, Mapping | Sequence):
            self._take_parts(content, node)
        self._check(node)

    def _take_parts(self, content: Collection[Any], node: Node) -> None:
        self.letters -= len(content)
        self._check(node)
        for part in content.values() if isinstance(content, Mapping) else content:
            value = part._value() if isinstance(part, Node) else part
            if isinstance(value, Mapping | list | tuple):
                self._take_parts(value, node)

    def _check(self, node: Node) -> None:
        if self.references < 0 or self.letters < 0:
            raise ForeignError(
                f"'{_name(node)}': the references of the configuration come to too much: more than "
                f"{_MOST_REFERENCES} are followed, or they make more than {_MOST_LETTERS} letters; "
                "write the value itself"
            )


def _name(node: Node) -> str:
    return escape(str(node._get_full_key(None)))[:200]


def _check_variable(name: str, value: object, node: Node, typed: Collection[str]) -> None:
    """Refuse that a file reads a variable of the environment that holds a secret."""
    key = _name(node)
    if key == _TYPED or any(f"{key}.".startswith(f"{known}.") for known in typed):
        return
    if names_secret(name) or cut_secrets(str(value)) != str(value):
        raise ForeignError(
            f"'{key}' reads the secret {escape(name)[:80]} of the environment, which only the command "
            f"line may: write it there, or leave it out of the file; {WHERE_CREDENTIALS_BELONG}"
        )
