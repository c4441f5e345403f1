#!/usr/bin/env python3
"""This script checks that names use the standard terms of the field, and that docstrings of functions begin with a verb.

It reads the modules and folders that are given as arguments (default: the product, and the names of the tests). It prints
each definition of a name that contains a word of scripts/words.toml, with the file, the line and what to use instead, and
each docstring of a function that begins with a word of its other list. It exits with 1 if there is one.
"""

import ast
import re
import sys
from pathlib import Path
from typing import Dict, Iterator, List, Set, Tuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ["clustertool", "scripts", "benchmarks", "tasks.py", "conf.py.example"]
TESTS = ["tests"]  # names only: the docstring of a test states a behaviour
_PART = re.compile(r"(?i:word2vec)|[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # word2vec is the name of an algorithm


def words_of(name: str) -> List[str]:
    """Return the lower-case words of a name in snake_case, CamelCase or CAPITALS."""
    return [part.lower() for part in _PART.findall(name)]


def definitions(tree: ast.AST) -> Iterator[Tuple[int, str]]:
    """Yield (line, name) where a module defines a function, a class, an argument, a variable, an attribute or an alias."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield getattr(node, "lineno", 1), node.asname
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.lineno, node.name


def modules(paths: List[Path]) -> Iterator[Path]:
    """Yield the Python files that the paths name or contain, sorted."""
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def findings(paths: List[Path], words: Dict[str, str], exceptions: Dict[str, Dict[str, str]]) -> List[str]:
    """Return one line for each name with a refused word, and one for each exception that no name needs."""
    found = []
    unused = {(file, name) for file, names in exceptions.items() for name in names}
    for path in modules(paths):
        file = path.relative_to(ROOT).as_posix() if ROOT in path.parents else path.name
        names = {(1, part) for part in Path(file).with_suffix("").parts} | set(
            definitions(ast.parse(path.read_bytes()))
        )
        for line, name in sorted(names):
            for word in words_of(name):
                if word not in words:
                    continue
                if name in exceptions.get(file, {}):
                    unused.discard((file, name))
                else:
                    found.append(f"{file}:{line}: the name {name} contains {word!r}; use: {words[word]}")
    found += [f"scripts/words.toml: no name needs the exception {name} of {file}" for file, name in sorted(unused)]
    return found


def without_verb(paths: List[Path], not_verbs: Set[str]) -> Iterator[str]:
    """Yield one line for each docstring that cannot begin with a verb. The one of a property is a noun."""
    for path in modules(paths):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            first = (ast.get_docstring(node) or "Do").split()[0].strip("`'\".,:;(){}").lower()
            noun = any(ast.unparse(one).endswith(("property", ".setter")) for one in node.decorator_list)
            if not noun and (first in not_verbs or not first.isalpha()):
                yield f"{path}:{node.lineno}: the docstring of {node.name} begins with {first!r}, not with a verb"


def main(arguments: List[str]) -> int:
    """Check the files that the arguments name, print the findings, and return the exit code."""
    with (ROOT / "scripts/words.toml").open("rb") as file:
        table = tomllib.load(file)
    exceptions = table["exceptions"] if not arguments else {}
    paths = [Path(a).resolve() for a in arguments] or [ROOT / p for p in PRODUCT]
    tests = [] if arguments else [ROOT / p for p in TESTS]
    found = findings(paths + tests, table["words"], exceptions)
    found += without_verb(paths, set(table["docstrings"]["not_verbs"].split()))
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
