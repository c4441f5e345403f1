#!/usr/bin/env python3
"""This script checks the size and the names of the modules and classes of the package, and that imports stand at the top.

It reads the limits and the exceptions of scripts/structure.toml. It prints one line for each finding, and exits with 1 if there
is one. `--figures` prints the lines, the files of each folder, the classes with most attributes, the imports and the uses of
Any instead.
"""

import ast
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Set, Tuple

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]


def modules(package: Path) -> Dict[str, ast.Module]:
    """Return the syntax tree of each module, by its path below the package."""
    return {
        path.relative_to(package).as_posix(): ast.parse(path.read_bytes()) for path in sorted(package.rglob("*.py"))
    }


def attributes(tree: ast.ClassDef) -> Set[str]:
    """Return the names that a class declares as fields, or assigns to `self`."""
    found = {
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(tree):
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and isinstance(node.value, ast.Name) and node.value.id == "self":
            found.add(node.attr)
    return found


def all_attributes(name: str, declared: Mapping[str, ast.ClassDef]) -> Set[str]:
    """Return the attributes of a class, also those of its bases in the package. declared: the classes of the package."""
    tree = declared[name]
    bases = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in tree.bases} & set(declared) - {name}
    return attributes(tree).union(*(all_attributes(base, declared) for base in bases))


def classes(trees: Mapping[str, ast.Module]) -> Iterator[Tuple[str, ast.ClassDef]]:
    """Yield (file, class) for each class at the top of a module."""
    for file, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                yield file, node


def uses_of_any(trees: Mapping[str, ast.Module]) -> int:
    """Return how often `Any` stands in a type."""
    return sum(isinstance(node, ast.Name) and node.id == "Any" for tree in trees.values() for node in ast.walk(tree))


def nested_imports(tree: ast.Module) -> List[ast.AST]:
    """Return the import statements inside functions and classes."""
    scopes = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    inside = {id(node): node for scope in ast.walk(tree) if isinstance(scope, scopes) for node in ast.walk(scope)}
    return [node for node in inside.values() if isinstance(node, (ast.Import, ast.ImportFrom))]


def calls(tree: ast.Module, name: str) -> bool:
    """Return whether a module calls a function or a method of this name."""
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(getattr(function, "attr", getattr(function, "id", "")) == name for function in called)


def folders(trees: Mapping[str, ast.Module]) -> Dict[str, int]:
    """Return the number of modules of each folder. An `__init__.py` is not counted."""
    return Counter(str(Path(file).parent) for file in trees if not file.endswith("__init__.py"))


def findings(package: Path, limits: Mapping[str, int], exceptions: Mapping[str, Mapping[str, str]]) -> List[str]:
    """Return one line for each thing that is over its limit, and for each exception that nothing needs."""
    trees = modules(package)
    found: Dict[Tuple[str, str], str] = {}
    for file in trees:
        lines = (package / file).read_text("utf-8").count("\n")
        if lines > limits["lines"]:
            found["lines", file] = f"{file} has {lines} lines: at most {limits['lines']}"
    for folder, count in folders(trees).items():
        most = limits.get(f"files in {folder}", limits["files"])
        if count > most:
            found["files", folder] = f"{folder} has {count} modules: at most {most}"
    stems: Dict[str, List[str]] = defaultdict(list)
    names: Dict[str, List[str]] = defaultdict(list)
    for file in trees:
        if not file.endswith("__init__.py"):
            stems[Path(file).stem].append(file)
        if count := len(nested_imports(trees[file])):
            found["imports", file] = f"{file} has {count} imports inside functions: put them at the top"
        if calls(trees[file], "import_module"):
            found["lazy", file] = f"{file} calls import_module: import at the top"
    for file, tree in classes(trees):
        names[tree.name].append(file)
    for kind, by_name in (("module", stems), ("class", names)):
        for name, files in by_name.items():
            if len(files) > 1:
                found[kind, name] = f"the {kind} name {name} is used by {', '.join(files)}"
    if uses_of_any(trees) > limits["Any"]:
        found["Any", ""] = f"Any is used {uses_of_any(trees)} times: at most {limits['Any']}"
    allowed = {(kind, name) for kind, reasons in exceptions.items() for name in reasons}
    unused = [
        f"scripts/structure.toml: no exception is needed for {kind} {name}" for kind, name in allowed - set(found)
    ]
    return [text for key, text in found.items() if key not in allowed] + sorted(unused)


def figures(package: Path) -> Iterator[str]:
    """Yield the figures of the package."""
    trees = modules(package)
    yield f"{sum((package / file).read_text('utf-8').count(chr(10)) for file in trees)} lines in {len(trees)} files"
    yield from (f"{count:3} modules in {folder}" for folder, count in sorted(folders(trees).items()))
    declared = {tree.name: tree for _, tree in classes(trees)}
    counts = Counter({name: len(all_attributes(name, declared)) for name in declared})
    yield from (f"{count:3} attributes of class {name}" for name, count in counts.most_common(20))
    yield f"{uses_of_any(trees)} uses of Any"
    yield f"{sum(len(nested_imports(tree)) for tree in trees.values())} imports inside functions"


def main(arguments: List[str]) -> int:
    """Print findings or figures, and return the exit code."""
    package = ROOT / "clustertool"
    if arguments == ["--figures"]:
        print(*figures(package), sep="\n")
        return 0
    settings: Dict[str, Any] = tomllib.loads((ROOT / "scripts" / "structure.toml").read_text("utf-8"))
    found = findings(package, settings["limits"], settings["exceptions"])
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
