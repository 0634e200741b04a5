"""Names of folders of good parts, recognized by whole words of several languages and their negations."""

import logging
import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from lit_data.core.errors import escape
from lit_data.core.names import split_words

log = logging.getLogger(__name__)

_PHRASES = (
    (re.compile(r"\bn i o\b|\bni o\b|\bn o k\b"), "nok"),
    (re.compile(r"\bi o\b|\bin ordnung\b|\bo k\b"), "ok"),
    (re.compile(r"\bw o\b"), "without"),
)
_WORDS: Mapping[str, str] = {
    "good": (
        "good goods ok oks okay okays okey io pass passed passes accept accepted acceptable approved "
        "normal normals intact healthy clean perfect correct conform conforming compliant "
        "flawless faultless defectless errorfree undamaged unbroken nondefective nondefect "
        "gut gute guten guter gutes gutteil gutteile fehlerfrei fehlerlos einwandfrei mangelfrei "
        "unbeschadigt unbeschaedigt ganz bon bons bonne bonnes conforme conformes normale normales "
        "buono buona buoni buone bueno buena buenos buenas bom boa goed goede "
        "dobry dobra dobre saglam 良品 良 合格 合格品 正常 양품 정상 норма годен годный хороший"
    ),
    "free": "free frei",
    "bad": (
        "bad bads ng ngs nok ko kos nio notok notgood nogood nonok defect defects defective defectives defekt defekte "
        "fault faults faulty fail fails failed failure failures error errors reject rejects "
        "rejected scrap damage damages damaged broken anomaly anomalies anomalous abnormal "
        "abnormals abnormality anormal anormale flaw flaws flawed blemish blemishes unacceptable "
        "unaccepted inacceptable "
        "unhealthy unclean dirty invalid incorrect imperfect nonconform nonconforming nonconformity "
        "noncompliant unnormal crack cracks cracked scratch scratches scratched dent dents stain "
        "stains hole holes pit pits diseased disease fehler fehlerhaft schlecht schlechte schlechtteil schlechtteile "
        "ausschuss mangel mangelhaft beschadigt beschaedigt kaputt mauvais mauvaise defaut defauts "
        "defectueux rebut malo mala malos malas defecto defectos defectuoso difetto difetti "
        "difettoso scarto scarti ruim defeito defeitos slecht zly wada 不良 不良品 不合格 不合格品 "
        "缺陷 异常 異常 次品 불량 брак дефект"
    ),
    "not": (
        "not no non un ab never without none isnt nicht kein keine keinen ohne pas sans ne sin senza sem "
        "nao niet geen zonder nie bez не без 无 無 没有"
    ),
    "of": "of from von de",
    "maybe": "fine negative negatives",
    "": (
        "very really all so sehr tres muy molto the image images img imgs picture pictures photo "
        "photos part parts sample samples piece pieces item items product products unit units teil "
        "teile bild bilder piezas pieces class klasse set data dataset folder quality status state "
        "condition train training val validation test testing"
    ),
}
_LETTERS = {"good": "g", "free": "f", "bad": "b", "not": "n", "of": "o", "maybe": "m", "": ""}
_UNKNOWN = "u"
_LETTER_OF = {
    word: _LETTERS[meaning] for meaning, words in _WORDS.items() for word in words.split()
}
_GOOD = re.compile("(g|(?<!n)bf|nb(?!f)|fob|f(?!b|ob))+")
"""Patterns of the letters of a name: good, defect free, no defect, free of defects, free."""
_HINTS = re.compile("[gfm]")
_FAULTS = re.compile("[bn]")
_TELLING = ("g", "f", "b", "m")
_MOST_NAMED = 20


GOOD = "good"
"""Kind of images of good parts, whatever the name of their folder."""


def name_kinds(
    folders: Sequence[Sequence[str]], good: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return the kind of each image: `GOOD`, or the name of its folder; empty without a folder.

    Kinds are the outermost folders, or the first level below them with a folder that is named
    after good parts, as in a dataset with a folder for each product.

    Args:
        folders: Folders of each image that may be its kind, the outermost first.
        good: Globs of the names of good folders; None recognizes them by their words.
    """
    _warn_of_misfits({part for parts in folders for part in parts}, good or ())
    level, good_names = 0, frozenset[str]()
    for depth in range(max(map(len, folders), default=0)):
        names = {parts[depth] for parts in folders if len(parts) > depth}
        good_names = find_good_names(names, good)
        if good_names:
            level = depth
            break
        if any(map(names_defect, names)):
            break
    kinds = [parts[level] if len(parts) > level else "".join(parts[-1:]) for parts in folders]
    if good is not None and _fits("", good):
        good_names |= {""}
    return tuple(GOOD if kind in good_names else kind for kind in kinds)


def describe_doubt(kinds: Collection[str], good: Sequence[str] | None = None) -> str:
    """Return why it is doubtful which kinds are good, or "" if it is clear.

    Args:
        kinds: Kinds that `name_kinds` returned.
        good: Globs that `name_kinds` was given.
    """
    names = sorted(set(kinds) - {GOOD, ""})
    listed = ", ".join(names[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    if good is not None:
        return "" if GOOD in kinds else f"data.good={list(good)} names none of the folders {listed}"
    if GOOD in kinds:
        doubtful = find_doubtful_names(names)
        return f"folders that may hold good parts or not: {', '.join(doubtful)}" if doubtful else ""
    # A single folder of any name has the images to learn from.
    if len(set(kinds)) < 2 and not any(map(names_defect, names)):
        return ""
    return f"no folder is known to hold good parts (found: {listed})"


def find_good_names(names: Collection[str], good: Sequence[str] | None = None) -> frozenset[str]:
    """Return the names of sibling folders that certainly have good parts.

    Words that all names begin or end with, such as that of a product, do not count.

    Args:
        names: Names of the folders.
        good: See `name_kinds`.
    """
    if good is not None:
        return frozenset(name for name in names if _fits(name, good))
    letters = _read_names(names)
    return frozenset(name for name, text in letters.items() if _GOOD.fullmatch(text))


def choose_good_classes(
    classes: Sequence[str], good: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return the classes of good parts; none if no name says so, or if all do.

    Args:
        classes: Names of the classes.
        good: See `name_kinds`.
    """
    names = find_good_names(set(classes), good)
    chosen = tuple(name for name in classes if name in names)
    return chosen if len(chosen) < len(classes) else ()


def find_doubtful_names(names: Collection[str]) -> list[str]:
    """Return names with a word for good beside unknown words, such as ``nearly_ok``."""
    doubtful = []
    for name, letters in sorted(_read_names(names).items()):
        is_good = _GOOD.fullmatch(letters) is not None
        if not is_good and _HINTS.search(letters) and not _FAULTS.search(letters):
            doubtful.append(name)
    return doubtful


def names_defect(name: str) -> bool:
    """Return True if a name is certainly that of parts that are not good."""
    letters = "".join(map(_letter_of, _list_words(name)))
    return _GOOD.fullmatch(letters) is None and _FAULTS.search(letters) is not None


def tells_quality(name: str) -> bool:
    """Return True if a name has a word about quality, good or bad."""
    return any(_letter_of(word) in _TELLING for word in _list_words(name))


def _warn_of_misfits(names: Collection[str], good: Sequence[str]) -> None:
    for glob in good:
        if not any(_fits(name, [glob]) for name in ("", *names)):
            log.warning("data.good: '%s' matches no folder of images", escape(glob))


def _fits(name: str, globs: Sequence[str]) -> bool:
    return any(name == glob or fnmatchcase(name, glob) for glob in globs)


def _read_names(names: Collection[str]) -> dict[str, str]:
    """Return a letter for each known word of each name."""
    words_of = {name: _list_words(name) for name in names if name}
    for end in (0, -1):
        _drop_shared(list(words_of.values()), end)
    return {name: "".join(map(_letter_of, words)) for name, words in words_of.items()}


def _drop_shared(lists: Sequence[list[str]], end: int) -> None:
    """Drop unknown words that all names have at one end."""
    if len(lists) < 2:
        return
    while all(len(words) > 1 for words in lists):
        word = lists[0][end]
        if _letter_of(word) != _UNKNOWN or any(words[end] != word for words in lists):
            return
        for words in lists:
            del words[end]


def _letter_of(word: str) -> str:
    return _LETTER_OF.get(word, _UNKNOWN)


@lru_cache(maxsize=1024)
def _join_words(name: str) -> str:
    text = " ".join(word for word in split_words(name) if not word.isdecimal())
    # Names of files often omit accents.
    plain = unicodedata.normalize("NFKD", text)
    text = unicodedata.normalize("NFC", "".join(c for c in plain if not unicodedata.combining(c)))
    for phrase, word in _PHRASES:
        text = phrase.sub(word, text)
    return text


def _list_words(name: str) -> list[str]:
    return _join_words(name).split()
