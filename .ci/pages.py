"""Reading level of pages and messages: ends with 1 if sentences are long, or if the field has another word.

Sentences are those outside of code, tables and headings. Messages are the texts of errors, of log lines, of the
``README.txt`` of synthetic datasets, and of comments in the configuration. CONTRIBUTING.md explains the style.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
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
    "learnt": "learned",
    "leaves? out": "skip",
    "left out": "skipped",
    "licences?": "license",
    "neighbour(s|ing)?": "neighbor",
    "normalis(ation|e[ds]?|ing)": "normalization, normalize",
    "occupied": "foreground",
    "quantis(ed?|es|ation)": "quantized, quantization",
    "seen from all sides": "multi-view",
    "mirrored on": "reflect-padded",
    "pieces": "micro-batches, or parts",
    "processor time": "CPU time",
    "recognised?": "recognized",
    "sample set": "synthetic dataset",
    "share of": "fraction of",
    "stands in": "is in",
    "surest": "with the highest score",
    "synthesis(ed|ing)": "synthesized, synthesizing",
    "told": "logged",
    "says": "prints, logs or names",
    "survives?": "recovers from",
    "turn(s|ed)?( them)? round": "invert",
}
IN_MESSAGES = {
    "(?<!there )(are|is) no": "is not a",
    "beside": "next to, in addition to, or with",
    "labelled": "labeled",
    "lies?": "is",
    "optimis(e|ation)|quantise": "optimize, quantize",
    "takes? the place": "replaces",
    "mend": "fix",
    "a share": "a fraction",
    "stands?": "is",
    "turns?( them)? round": "invert",
}
"""Words that messages do not have either."""
LOGGING = {"debug", "info", "warning", "error", "exception", "rank_zero_info", "rank_zero_warn"}
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


def list_messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each message of a file of Python, or of each comment of a file of YAML."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yaml":
        for number, line in enumerate(text.splitlines(), 1):
            yield number, line.partition("#")[2]
        return
    for node in ast.walk(ast.parse(text)):
        called = node.func if isinstance(node, ast.Call) else None
        name = getattr(called, "attr", getattr(called, "id", ""))
        if isinstance(node, ast.Raise) or name in LOGGING or assigns_readme(node):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def assigns_readme(node: ast.AST) -> bool:
    """Return True for the text of the README.txt of a dataset."""
    target = node.targets[0] if isinstance(node, ast.Assign) else None
    return isinstance(target, ast.Name) and target.id == "README"


def count_unusual_messages() -> int:
    """Print each message with a word for which the field has another, and return how many there are."""
    count = 0
    words = WORDS | IN_MESSAGES
    files = [*(ROOT / "lit_data").rglob("*"), *(ROOT / "lit_inspect").glob("*.py")]
    for path in sorted(path for path in files if path.suffix in (".py", ".yaml")):
        for line, message in list_messages(path):
            prose = INLINE_CODE.sub("", message)
            for word in words:
                if re.search(rf"(?<![.\w=])({word})\b(?!=)", prose):
                    print(f"{path.relative_to(ROOT)}:{line}: '{word}': write '{words[word]}'")
                    count += 1
    return count


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
    return int(code or count_unusual_messages() > 0)


if __name__ == "__main__":
    sys.exit(main())
