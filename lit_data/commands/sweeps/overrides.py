"""Overrides of the jobs of a sweep: those that compute, those that differ, and the space of a search."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.core.override_parser.types import (
    IntervalSweep,
    Override,
    QuotedString,
    RangeSweep,
    Transformer,
)

from lit_data.errors import ConfigError, DataError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

_FREE = ("sweep.", "paths.runs", "paths.cache")  # they change nothing of what a job computes


def describe_differences(old: Mapping[str, Any], new: Mapping[str, str]) -> str:
    """Return what two starts of a sweep say otherwise, by keys; empty if nothing."""
    texts = []
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            texts.append(f"{key}: {old.get(key, 'nothing')} then, {new.get(key, 'nothing')} now")
    return "; ".join(texts)


def keep_computing(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides that change what a job computes, and not where it runs."""
    return tuple(word for word in overrides if not word.lstrip("+~").startswith(_FREE))


class Space(NamedTuple):
    """Values for a search to choose from, and overrides that all of its jobs share."""

    distributions: "dict[str, BaseDistribution]"
    shared: list[str]

    @classmethod
    def read(cls, overrides: Sequence[Override]) -> "Space":
        """Return the space that overrides span; of two for one key the later one holds.

        Raises:
            ConfigError: there is nothing to choose, or a range is none.
        """
        by_key = {override.get_key_element().lstrip("+"): override for override in overrides}
        space = cls({}, [])
        for override in by_key.values():
            if override.is_sweep_override():
                space.distributions[override.get_key_element()] = read_distribution(override)
            else:
                space.shared.append(str(override.input_line))
        if not space.distributions:
            raise ConfigError(
                "a search needs keys with values to choose from, such as "
                "'model.optimizer.lr=tag(log, interval(1e-4, 1e-2))'"
            )
        return space

    def write(self, params: Mapping[str, Any]) -> list[str]:
        """Return the overrides of a job.

        Args:
            params: its values; they may come from anybody's journal.

        Raises:
            DataError: a value is not one of the space.
        """
        overrides = list(self.shared)
        for key, distribution in self.distributions.items():
            value = params.get(key)
            if not _is_within(distribution, value):
                raise DataError(f"the search's journal has {key}={value!a:.80}, outside its space")
            overrides.append(f"{key}={value}")
        return overrides


def read_distribution(override: Override) -> "BaseDistribution":
    """Return what an override with several values lets Optuna choose from.

    ``interval(a, b)`` includes both ends; ``range(a, b, step)`` has the values that Hydra gives it,
    so it ends before b.

    Raises:
        ConfigError: the range is empty, or its tags or ends do not fit.
    """
    from optuna.distributions import CategoricalDistribution

    value, line = override.value(), override.input_line
    tags = set(getattr(value, "tags", ()))
    is_range = isinstance(value, RangeSweep) and not value.shuffle
    is_log = tags == {"log"}
    if tags and not (is_log and (is_range or isinstance(value, IntervalSweep))):
        raise ConfigError(
            f"'{line}' has the tags {', '.join(sorted(tags))}: only log is known, of interval and "
            "range"
        )
    try:
        if isinstance(value, IntervalSweep):
            return _make_number(value.start, value.end, None, is_log=is_log)
        if isinstance(value, RangeSweep) and is_range:
            numbers = list(value.range())
            return _make_number(min(numbers), max(numbers), abs(value.step), is_log=is_log)
        choices: list[Any] = list(override.sweep_iterator(transformer=_write_choice))
        return CategoricalDistribution(choices)
    except ValueError as error:
        raise ConfigError(f"'{line}': {error}") from error


def _make_number(low: Any, high: Any, step: Any, *, is_log: bool) -> "BaseDistribution":  # noqa: ANN401 - numbers of Hydra's parser
    from optuna.distributions import FloatDistribution, IntDistribution

    if all(isinstance(number, int) for number in (low, high, step or 1)):
        return IntDistribution(low, high, log=is_log, step=step or 1)
    return FloatDistribution(low, high, log=is_log, step=step)


def _write_choice(value: Any) -> Any:  # noqa: ANN401 - elements of Hydra's parser
    """Return a choice as Optuna keeps it: a number, a bool, or the text of an override."""
    return Transformer.str(value) if isinstance(value, QuotedString) else Transformer.encode(value)


def _is_within(distribution: "BaseDistribution", value: object) -> bool:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(distribution, CategoricalDistribution):
        return any(value == one and type(value) is type(one) for one in distribution.choices)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    kind = int if isinstance(distribution, IntDistribution) else float
    return type(value) is kind and distribution.low <= value <= distribution.high
