"""Measures of the house, and what some must not exceed: ends with 1 where one got worse.

They are those of `lit_data`. Code lines and tokens leave out blanks, comments and docstrings. Dense
expressions are comprehensions, lambdas, conditional expressions and assignments inside of expressions. A lone file has
under 80 lines and one file alone imports it.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
MOST = {
    "files in circles": 0,
    "casts": 18,
    "longest function": 57,
    "median function": 7,
    "files with private names of Lightning": 1,
    "dense expressions per 1000 code lines": 48,
    "functions with vague names": 0,
    "docstrings that begin with a question": 0,
}
LEAST = {"comments per 1000 code lines": 42}
DENSE = (
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.Lambda,
    ast.IfExp,
    ast.NamedExpr,
)
VAGUE = {
    "found",
    "place",
    "wanted",
    "own",
    "hand",
    "told",
    "said",
    "kept",
    "whole",
    "made",
    "given",
    "about",
    "shown",
}
QUESTIONS = ("What ", "Who ", "Whether ", "How ", "Where ", "Which ")
PRIVATE = re.compile(
    r"^from lightning\S* import .*\b_[a-z]\w*|trainer\._|fit_loop\.\w*\._|epoch_loop\._",
    re.MULTILINE,
)
SILENT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


@dataclass(frozen=True)
class SourceFile:
    """A file of Python, its tree, and its tokens."""

    path: Path
    text: str
    tree: ast.Module
    tokens: list[tokenize.TokenInfo]

    @classmethod
    def read(cls, path: Path) -> "SourceFile":
        """Read and parse a file."""
        text = path.read_text(encoding="utf-8")
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        return cls(path, text, ast.parse(text), tokens)

    @property
    def code(self) -> list[tokenize.TokenInfo]:
        """Tokens that are neither layout nor comments nor docstrings."""
        prose: set[int] = set()
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
                continue
            if isinstance(node.value.value, str):
                prose |= set(range(node.lineno, (node.end_lineno or 0) + 1))
        return [t for t in self.tokens if t.type not in SILENT and t.start[0] not in prose]

    @property
    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All functions and methods."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    @property
    def is_small(self) -> bool:
        """True below 80 lines."""
        return not self.path.name.startswith("__") and len(self.text.splitlines()) < 80


def measure() -> dict[str, int]:
    """Return each measure of `MOST` and `LEAST`."""
    files = {_name(path): SourceFile.read(path) for path in _list_paths()}
    functions = [function for file in files.values() for function in file.functions]
    lengths = [_count_lines(function) for function in functions]
    imports = _list_imports(files)
    users: dict[str, list[str]] = {name: [] for name in files}
    for name, imported in imports.items():
        for used in imported:
            users[used].append(name)
    tokens = lines = comments = 0
    for file in files.values():
        code = file.code
        tokens += len(code)
        lines += len({line for token in code for line in range(token.start[0], token.end[0] + 1)})
        comments += sum(token.type == tokenize.COMMENT for token in file.tokens)
    nodes = [node for file in files.values() for node in ast.walk(file.tree)]
    return {
        "files": len(files),
        "files in circles": sum(name in _reach(name, imports) for name in files),
        "casts": sum(_is_cast(node) for node in nodes),
        "longest function": max(lengths),
        "lone files": sum(len(users[name]) == 1 and file.is_small for name, file in files.items()),
        "median function": round(median(lengths)),
        "files with private names of Lightning": sum(
            bool(PRIVATE.search(file.text)) for file in files.values()
        ),
        "tokens": tokens,
        "tokens per 100 code lines": round(100 * tokens / lines),
        "dense expressions per 1000 code lines": round(
            1000 * sum(isinstance(node, DENSE) for node in nodes) / lines
        ),
        "functions with vague names": sum(map(_binds_vague_name, functions)),
        "docstrings that begin with a question": sum(map(_asks, nodes)),
        "comments per 1000 code lines": round(1000 * comments / lines),
    }


def _list_paths() -> Iterator[Path]:
    for path in sorted((ROOT / "lit_data").rglob("*.py")):
        if not path.is_relative_to(ROOT / "lit_data/conf"):
            yield path


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def _count_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or 0) - docstring.lineno + 1
    return lines


def _list_imports(files: Mapping[str, SourceFile]) -> dict[str, set[str]]:
    """List the files that each file imports at its top."""
    imports: dict[str, set[str]] = {}
    for name, file in files.items():
        names: set[str] = set()
        for node in file.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module)
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
        imports[name] = (names & files.keys()) - {name}
    return imports


def _reach(name: str, imports: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(imports[name])
    while waiting:
        imported = waiting.pop()
        if imported not in reached:
            reached.add(imported)
            waiting += imports[imported]
    return reached


def _is_cast(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "cast"


def _binds_vague_name(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            return True
    return False


def _asks(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
        return False
    return (ast.get_docstring(node) or "").startswith(QUESTIONS)


def main() -> int:
    """Print the measures; return 1 where one got worse."""
    has_worse = False
    for name, value in measure().items():
        line = f"{name}: {value}"
        if value > MOST.get(name, value):
            line += f", more than {MOST[name]}"
        elif value < LEAST.get(name, value):
            line += f", less than {LEAST[name]}"
        else:
            print(line)
            continue
        has_worse = True
        print(line)
    return int(has_worse)


if __name__ == "__main__":
    sys.exit(main())
