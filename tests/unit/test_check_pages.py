"""The check of the pages finds each line that is too long and can be broken, and no other one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECK = Path(__file__).resolve().parents[2] / "scripts/check-pages.py"
LONG = "word " * 24 + "end"  # 123 characters
ACCEPTED = f"""\
# {LONG}
<!-- {LONG} -->
| {LONG} | cell |
{LONG[:120]}
- [{LONG}](page.md)
`{LONG}`
{"x" * 121} after it
    ```sh
    {LONG}
    ```
````
```
{LONG}
````
"""


def check(path: Path, text: str) -> list[int]:
    path.write_text(text, encoding="utf-8")
    done = subprocess.run([sys.executable, str(CHECK), str(path)], capture_output=True, text=True, timeout=60)
    found = [int(line.split(":")[1]) for line in done.stdout.splitlines()]
    assert done.returncode == bool(found) and not done.stderr
    return found


def test_lines_that_can_be_broken(tmp_path: Path) -> None:
    assert check(tmp_path / "page.md", f"{LONG}\n\n- {LONG}\n1. {LONG}\n> {LONG}\n{LONG[:118]} `a b`\n") == [
        1,
        3,
        4,
        5,
        6,
    ]


def test_lines_that_may_be_longer(tmp_path: Path) -> None:
    assert check(tmp_path / "page.md", ACCEPTED) == []
    assert check(tmp_path / "page.md", f"{ACCEPTED}{LONG}\n") == [ACCEPTED.count("\n") + 1]
