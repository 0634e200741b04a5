"""Reading level of the pages: ends with 1 where sentences are long, or where the field has another word.

Sentences are those outside of code, tables and headings. CONTRIBUTING.md explains the style.
"""

import json
import re
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
MOST_WORDS = 20
"""Of the median sentence of a page."""
DOCS = ROOT / "docs"
CHANGELOG = DOCS / "changelog.md"  # says what things were called before
REFERENCE = DOCS / "reference"  # written out of docstrings with the site
WORDS = {
    "anew": "again",
    "alike often": "equally often",
    "at hand": "available",
    "behaviour": "behavior",
    "broken off": "interrupted",
    "centre": "center",
    "colours?": "color",
    "drawn images": "synthetic images",
    "drawn set": "synthetic dataset",
    "drawn surfaces": "synthetic surfaces",
    "drawn volumes": "synthetic volumes",
    "ended well": "finished",
    "for ever": "forever",
    "go(es)? on": "resume, or continue",
    "grey": "gray",
    "in the place of": "instead of",
    "labell(ed|ing)": "labeled, labeling",
    "lane": "inference thread",
    "lanes": "inference threads",
    "leaves? out": "skip",
    "left out": "skipped",
    "licences?": "license",
    "neighbour(s|ing)?": "neighbor",
    "normalisation|normalised?": "normalization, normalized",
    "occupied": "foreground",
    "seen from all sides": "multi-view",
    "mirrored on": "reflect-padded",
    "pieces": "micro-batches, or parts",
    "processor time": "CPU time",
    "recognised?": "recognized",
    "sample set": "synthetic dataset",
    "share of": "fraction of",
    "stands in": "is in",
    "surest": "with the highest score",
    "told": "logged",
    "says": "prints, logs or names",
    "survives?": "recovers from",
    "turn(s|ed)?( them)? round": "invert",
}
CODE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`]*`")
NO_PROSE = re.compile(r"^\s*(\||#|!\[|<|\(\w+\)=|\+|:::|---).*$", re.MULTILINE)
ITEM = re.compile(r"^\s*([-*]|\d+\.)\s", re.MULTILINE)
LINK = re.compile(r"\]\([^)]*\)")
END_OF_SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`*\[(\"'])")


def list_sentences(page: str) -> list[str]:
    """Return the sentences of a page in Markdown."""
    prose = NO_PROSE.sub("\n", CODE.sub("\n", page))
    paragraphs = re.split(r"\n\s*\n", ITEM.sub("\n\n", prose))
    sentences = []
    for paragraph in paragraphs:
        sentences += END_OF_SENTENCE.split(paragraph.strip())
    return [sentence for sentence in sentences if " " in sentence]


def count_words(sentence: str) -> int:
    """Count the words of a sentence; code counts as one, the address of a link as none."""
    plain = INLINE_CODE.sub("code", LINK.sub("]", sentence))
    return len(re.findall(r"[\w'%.-]*\w", plain))


def list_unusual_words(page: str) -> list[str]:
    """Return the words of a page for which the field has others."""
    prose = LINK.sub("]", INLINE_CODE.sub("", CODE.sub("", page)))
    return [word for word in WORDS if re.search(rf"\b({word})\b", prose, re.IGNORECASE)]


def read_page(path: Path) -> str:
    """Return the Markdown of a page, or that of a notebook's cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def main() -> int:
    """Print the median sentence of each page, and return 1 where something is to be rewritten."""
    code = 0
    pages = [path for path in sorted(DOCS.rglob("*.md")) if not path.is_relative_to(REFERENCE)]
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in (*sorted(ROOT.glob("*.md")), *pages, *notebooks):
        page = read_page(path)
        lengths = [count_words(sentence) for sentence in list_sentences(page)]
        words = median(lengths or [0])
        notes = [f"more than {MOST_WORDS}"] if words > MOST_WORDS else []
        if path != CHANGELOG:
            notes += [f"'{word}': write '{WORDS[word]}'" for word in list_unusual_words(page)]
        print(f"{path.relative_to(ROOT)}: {words:g} words in the median sentence", *notes, sep=", ")
        code = code or bool(notes)
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
