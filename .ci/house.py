"""Measures of the house, and what they must not exceed: ends with 1 where one got worse.

The median line is that of the code of `lit_data` and `callbacks`, without blanks, comments and
docstrings. A lone file has under 80 lines and one file alone imports it.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {
    "files": 394,
    "files in circles": 0,
    "casts": 25,
    "longest function": 62,
    "lone files": 3,
    "median function": 6,
    "median line": 38,
    "files with private names of Lightning": 1,
}
PRIVATE = re.compile(
    r"^from lightning\S* import .*\b_[a-z]\w*|trainer\._|fit_loop\.\w*\._|epoch_loop\._",
    re.MULTILINE,
)


def measure() -> dict[str, int]:
    """Each measure of `LIMITS`."""
    files = {_name(path): path for path in _files()}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}
    lines = [line for name, path in files.items() for line in _code_lines(path, trees[name])]
    functions = [length for tree in trees.values() for length in _function_lengths(tree)]
    imports = {
        name: {found for found in _imports(tree) if found in files} - {name}
        for name, tree in trees.items()
    }
    users = {name: [user for user, found in imports.items() if name in found] for name in files}
    casts = sum(
        isinstance(n, ast.Call) and getattr(n.func, "id", "") == "cast"
        for t in trees.values()
        for n in ast.walk(t)
    )
    return {
        "files": len(files),
        "files in circles": sum(name in _reach(name, imports) for name in files),
        "casts": casts,
        "longest function": max(functions),
        "lone files": sum(
            len(users[name]) == 1 and _is_small(path) for name, path in files.items()
        ),
        "median function": round(median(functions)),
        "median line": round(median(map(len, lines))),
        "files with private names of Lightning": sum(
            bool(PRIVATE.search(p.read_text("utf-8"))) for p in files.values()
        ),
    }


def _files() -> Iterator[Path]:
    for top in ("lit_data", "callbacks"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if not path.is_relative_to(ROOT / "lit_data/callbacks") and not path.is_relative_to(
                ROOT / "lit_data/conf"
            ):
                yield path


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("lit_data", *parts) if parts[0] == "callbacks" else parts).removesuffix(
        ".__init__"
    )


def _is_small(path: Path) -> bool:
    return (
        not path.name.startswith("__") and len(path.read_text(encoding="utf-8").splitlines()) < 80
    )


def _code_lines(path: Path, tree: ast.Module) -> list[str]:
    text = path.read_text(encoding="utf-8")
    prose = {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    silent = (
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    )
    tokens = (
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in silent
    )
    numbers = {
        number for token in tokens for number in range(token.start[0], token.end[0] + 1)
    } - prose
    lines = text.splitlines()
    return [lines[number - 1].strip() for number in sorted(numbers)]


def _function_lengths(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            is_prose = ast.get_docstring(node, clean=False) is not None
            prose = (first.end_lineno or 0) - first.lineno + 1 if is_prose else 0
            yield (node.end_lineno or 0) - node.lineno + 1 - prose


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _reach(name: str, imports: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(imports[name])
    while waiting:
        found = waiting.pop()
        if found not in seen:
            seen.add(found)
            waiting += imports[found]
    return seen


if __name__ == "__main__":
    worse = False
    for what, value in measure().items():
        is_worse = value > LIMITS[what]
        worse |= is_worse
        print(f"{what}: {value}" + (f", more than {LIMITS[what]}" if is_worse else ""))
    sys.exit(worse)
