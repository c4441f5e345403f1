#!/usr/bin/env python3
"""This script checks that the lines of the Markdown pages have at most 120 characters.

It reads docs/ and CONTRIBUTING.md, or the pages that are given as arguments. It prints the file and the number of each longer
line, and exits with 1 if there is one. Code blocks, rows of tables, headings and comments may be longer, and so may a line
without a blank outside of code and links at which it can be broken.
"""

import re
import sys
from pathlib import Path
from typing import Iterator, List

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120
_FENCE = re.compile(r"\s*(`{3,}|~{3,})")
_PREFIX = re.compile(r"\s*(?:[-*+] |\d+[.)] )?\s*")
_WHOLE = re.compile(r"(`+)(?:(?!\1).)+\1|\[[^]]*\]\([^)]*\)")  # a code span, a link
_UNBROKEN = ("|", "#", "<!--")


def long_lines(text: str) -> Iterator[int]:
    """Yield the number of each line that is too long and can be broken."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        found = _FENCE.match(line)
        if found and (not fence or line.strip() == fence):
            fence = "" if fence else found[1]
        elif not fence and len(line) > WIDTH and not line.lstrip().startswith(_UNBROKEN):
            whole = _WHOLE.sub(lambda part: "x" * len(part[0]), line)
            if " " in whole[len(_PREFIX.match(line)[0]) : WIDTH + 1]:  # type: ignore[index]
                yield number


def main(arguments: List[str]) -> int:
    """Print the long lines of the pages. Return the exit status."""
    pages = [Path(one) for one in arguments] or [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
    findings = [f"{page}:{number}" for page in pages for number in long_lines(page.read_text(encoding="utf-8"))]
    for finding in findings:
        print(f"{finding}: more than {WIDTH} characters; break the line")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
