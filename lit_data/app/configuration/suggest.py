"""The nearest allowed name to a misspelt one."""

from collections.abc import Iterable
from difflib import SequenceMatcher

_LEAST_RATIO = 0.6  # difflib's own default for get_close_matches
_LEAST_ELSEWHERE = 0.7  # of keys below another parent, which are many


def nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the name most like `word`, or None when none is alike."""
    scores = {name: _score_likeness(word, name) for name in names}
    best = max(scores, key=scores.__getitem__, default=None)
    return best if best is not None and scores[best] >= _LEAST_RATIO else None


def nearest_key(key: str, keys: Iterable[str]) -> str | None:
    """Return the dotted key whose last part is most like that of `key`, or None when none is alike.

    The same parent wins among equals.
    """
    parent, _, last = key.rpartition(".")
    scores = {}
    for name in keys:
        other_parent, _, other_last = name.rpartition(".")
        least = _LEAST_RATIO if parent == other_parent else _LEAST_ELSEWHERE
        if _score_likeness(last, other_last) >= least or last in other_last.split("_"):
            scores[name] = _score_key(key, name)
    return max(scores, key=scores.__getitem__, default=None)


def did_you_mean(name: str | None) -> str:
    """Return `" Did you mean 'name'?"`, or nothing when there is no name to offer."""
    return f" Did you mean '{name}'?" if name else ""


def _score_likeness(word: str, name: str) -> float:
    return SequenceMatcher(None, word.lower(), name.lower()).ratio()


def _score_key(key: str, name: str) -> float:
    parent, _, last = key.rpartition(".")
    other_parent, _, other_last = name.rpartition(".")
    same_parent = 0.1 if parent == other_parent else 0.0
    return _score_likeness(last, other_last) + same_parent + 0.05 * _score_likeness(key, name)
