"""scripts/check-structure.py finds what is over its limit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

LIMITS = {"lines": 4, "files": 2, "Any": 1}


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "scripts" / "check-structure.py"
    spec = importlib.util.spec_from_file_location("check_structure", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "files, found",
    [
        ({"a.py": "x = 1\n" * 4}, []),
        ({"a.py": "x = 1\n" * 5}, ["a.py has 5 lines: at most 4"]),
        ({"p/a.py": "", "p/b.py": "", "p/__init__.py": ""}, []),
        ({"p/a.py": "", "p/b.py": "", "p/c.py": ""}, ["p has 3 modules: at most 2"]),
        ({"a.py": "class A: ...\n", "b.py": "class A: ...\n"}, ["the class name A is used by a.py, b.py"]),
        ({"p/a.py": "", "q/a.py": ""}, ["the module name a is used by p/a.py, q/a.py"]),
        ({"p/stop.py": "", "verbs/stop.py": ""}, ["the module name stop is used by p/stop.py, verbs/stop.py"]),
        ({"a.py": "async def f():\n    import os\n"}, ["a.py has 1 imports inside functions: put them at the top"]),
        (
            {"a.py": "class A:\n    def f(self):\n        from os import path\n"},
            ["a.py has 1 imports inside functions: put them at the top"],
        ),
        (
            {"a.py": "import importlib\nimportlib.import_module('os')\n"},
            ["a.py calls import_module: import at the top"],
        ),
        ({"a.py": "x: Any\ny: List[Any]\n"}, ["Any is used 2 times: at most 1"]),
    ],
)
def test_a_finding_for_each_limit(checker: ModuleType, tmp_path: Path, files: dict[str, str], found: list[str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert checker.findings(tmp_path, LIMITS, {}) == found


def test_an_exception_that_nothing_needs_is_a_finding(checker: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n" * 5)
    assert checker.findings(tmp_path, LIMITS, {"lines": {"a.py": "a reason"}}) == []
    unused = "scripts/structure.toml: no exception is needed for lines b.py"
    assert checker.findings(tmp_path, {**LIMITS, "lines": 5}, {"lines": {"b.py": "a reason"}}) == [unused]


def test_the_attributes_of_classes_are_reported(checker: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A:\n    x: int\n    def f(self):\n        self.y = self.z = self.x\n")
    (tmp_path / "b.py").write_text("class B(a.A, List[int]):\n    w: int\n")
    reported = [line.strip() for line in checker.figures(tmp_path) if "attributes" in line]
    assert reported == ["4 attributes of class B", "3 attributes of class A"]
