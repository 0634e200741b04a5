"""Words in the names of files and folders, and names of masks and images."""

import logging
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache

log = logging.getLogger(__name__)

_ZEROS = re.compile(r"(?<=\d)\.0+$")
_MISSING = frozenset(("nan", "none", "null", "na", "n/a", "<na>"))
"""Words that tables write for an empty cell."""
_WORD = re.compile(r"\d+|[A-Z]+(?![^\W\d_A-Z])|[^\W\d_][^\W\d_A-Z]*")
_SPLIT = "train(ing)?|val(id(ation)?)?|test(ing)?"
_FORMS = "images?|imgs?|png|jpe?g|tiff?|files?|dir|folder|tr|ts"
_MASK_FOLDER = re.compile(
    rf"(({_SPLIT}|images?|imgs?|defects?|binary|pixel|semantic|sem) ?)*"
    r"((masks?|gts?|ground ?truths?|labels?|annotations?|annots?|annos?|anns?|seg(mentations?)?|"
    r"targets?|semantics?) ?)+"
    rf"(({_FORMS}|{_SPLIT}|class|fine|coarse|trainids|ids) ?)*"
)
_SPLIT_OF_A_SET = re.compile(rf"seg ({_SPLIT})")
_IMAGE_FOLDER = re.compile(
    rf"(({_SPLIT}) )?(images?|imgs?|jpeg images|pictures?|photos?|data|rgb|left img 8 bit|inputs?)"
    rf"( ({_FORMS}|{_SPLIT}))*"
)
_REPEATING_FOLDER = re.compile(
    r"segmentation object( png)?|segmentation (class|object) (npy|visualization)|visualization|"
    r"(.* )?panoptic( .*)?"
)
_INSTANCE_FOLDER = re.compile(rf"(({_SPLIT}) )?instances?( ({_FORMS}|{_SPLIT}))*")
_SIDE_FOLDER = re.compile(r"instances?( .*)?|depths?|disparit(y|ies)|xyz|dem|dsm")
_MASK_ENDING = re.compile(
    r"[\W_](masks?|gts?|labels?|seg|segmentations?|ground_?truth|anno|annotations?|targets?|"
    r"(gt(fine|coarse)[_-])?label(train)?ids)$",
    re.IGNORECASE,
)
_MASK_START = re.compile(
    r"^(masks?|gts?|ground_?truth|segmentations?)(?=[\W_\d])[\W_]*", re.IGNORECASE
)
_REPEATING_ENDING = re.compile(
    r"[_.-](parts?_\d+|parts|instance(train)?ids|labeltrainids|instances?|colou?r(ed)?|vi[sz]|"
    r"visuali[sz]ations?|overlays?|blend|dem|dsm|depth|disparity|panoptic)$",
    re.IGNORECASE,
)
_REPEATING_START = re.compile(r"^instance_\d+_", re.IGNORECASE)

_IMAGE_STEM = "image img im sat rgb rgbir irrg photo picture input original volume imaging ct scan"
_MASK_STEM = "mask masks m label labels gt seg segmentation target targets groundtruth"
IMAGE_WORDS = frozenset(_IMAGE_STEM.split())
MASK_WORDS = frozenset(_MASK_STEM.split())


def split_words(name: str) -> list[str]:
    """Return the words and numbers of a name in lower case: ``NotOK_2024`` gives not, ok, 2024.

    A change from lower to upper case begins a word. Composed and decomposed accents are equal.
    """
    return [word.casefold() for word in _WORD.findall(compose(name))]


def compose(name: str) -> str:
    """Return a name with composed accents, since systems use either form."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def warn_of_names(classes: Iterable[str]) -> None:
    """Warn of names of classes that differ only in case, blanks or Unicode form, or mean an empty cell."""
    alike: dict[str, list[str]] = defaultdict(list)
    for name in sorted(set(classes)):
        words = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
        alike[_ZEROS.sub("", words)].append(name)  # spreadsheets write 1 as 1.0
    twins = [", ".join(map(ascii, names)) for names in alike.values() if len(names) > 1]
    if twins:
        log.warning(
            "classes differ only in case, spaces, .0 or Unicode form: %s; if they are one class, give "
            "it one name",
            "; ".join(twins),
        )
    missing: list[str] = []
    for word in sorted(_MISSING & alike.keys()):
        missing += map(ascii, alike[word])
    if missing:
        log.warning(
            "labels that often mean an empty cell are classes like any other: %s; leave the cell "
            "empty for an image without a label",
            ", ".join(missing),
        )


def is_mask_folder(name: str) -> bool:
    """Return True for folders of masks, such as ``masks``, ``train_gt``, ``ann_dir`` and ``labelsTr``."""
    return _fits(_MASK_FOLDER, name) and not _fits(_SPLIT_OF_A_SET, name)


def is_instance_folder(name: str) -> bool:
    """Return True for folders of instances, which serve as masks if there are no others."""
    return _fits(_INSTANCE_FOLDER, name)


def strip_folder(name: str) -> str:
    """Return the rest of the name of a folder of images or masks, such as its split, or other names unchanged."""
    if not (is_mask_folder(name) or is_image_folder(name) or is_side_folder(name)):
        return name
    return " ".join(word for word in split_words(name) if re.fullmatch(_SPLIT, word))


def is_side_folder(name: str) -> bool:
    """Return True for folders of other annotations besides masks, such as instances and depths."""
    return _fits(_SIDE_FOLDER, name)


def is_image_folder(name: str) -> bool:
    """Return True for folders whose names only say that they contain images."""
    return _fits(_IMAGE_FOLDER, name)


def repeats_masks(name: str) -> bool:
    """Return True for folders that repeat the masks or annotations beside them in another form."""
    return _fits(_REPEATING_FOLDER, name)


@lru_cache(maxsize=4096)
def _fits(pattern: re.Pattern[str], name: str) -> bool:
    # A capital letter may or may not begin a word: gtFine, GTs.
    words = " ".join(split_words(name)), " ".join(re.split(r"[\W_]+", name.casefold()))
    return any(map(pattern.fullmatch, words))


def plain_stem(stem: str) -> str:
    """Return a stem in lower case without a mask ending, with numbers without leading zeros."""
    return plain_number(_MASK_ENDING.sub("", compose(stem)).casefold())


def strip_mask_word(stem: str) -> str:
    """Return a stem without a mask word at its end or start."""
    stem = compose(stem)
    return _MASK_ENDING.sub("", stem) if _MASK_ENDING.search(stem) else _MASK_START.sub("", stem)


def plain_number(text: str) -> str:
    """Return a number without leading zeros, and other text unchanged."""
    return text.lstrip("0") or "0" if text.isdecimal() else text


def find_mask_ending(stem: str) -> str:
    """Return the mask ending of a stem, such as ``_mask``, or "" without one."""
    match = _MASK_ENDING.search(stem)
    return match[0].lower() if match else ""


def find_mask_start(stem: str) -> str:
    """Return the mask prefix of a stem, such as ``gt_``, or "" without one."""
    match = _MASK_START.search(stem)
    return match[0].lower() if match else ""


def strip_repeating(stem: str) -> str | None:
    """Return the stem that a picture repeats, if its name says that it shows masks in another form, or None."""
    for pattern in (_REPEATING_ENDING, _REPEATING_START):
        if pattern.search(stem):
            return pattern.sub("", stem)
    return None
