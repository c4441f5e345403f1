#!/usr/bin/env python3
"""This script builds the documentation site: the pages of docs/, and what is made from the code.

usage: make-docs.py FOLDER

It writes FOLDER/pages and FOLDER/zensical.toml, and with Zensical the site in FOLDER/site. It ends with 1, and prints every
finding, if a link leads nowhere or Zensical has a warning (`--strict`).

- A line `<!-- made from the code: NAME -->` in a page is replaced by what MADE[NAME] returns.
- A pattern in the navigation of docs/zensical.toml means all pages that match, by name; they may be none.
- A link to a file outside docs/ leads to its page on the site (OUTSIDE), or becomes text where it has none.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from clustertool.cli.options import Opt, Verb  # noqa: E402
from clustertool.cli.verb_table import VERBS  # noqa: E402
from clustertool.engines import known_engines  # noqa: E402
from clustertool.model.config.cluster import KEYS  # noqa: E402

DOCS = ROOT / "docs"
# Files outside docs/ that have a page on the site: their path in the repository, and that of the page.
OUTSIDE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
    "README.zh-CN.md": "zh-CN/index.md",
    "conf.py.example": "reference/conf-py.md",
    "docs/decisions": "decisions/index.md",
    "workspaces": "examples/index.md",
}
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\]\([^()]*\))*)\]\(([^()\s#]*)(#[^()\s]*)?\)")
_MADE = re.compile(r"^<!-- made from the code: (.+?) -->$", re.M)
_FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1\s*$", re.M | re.S)
_CODE_SUFFIXES = {".py": "python", ".toml": "toml", ".txt": "text"}


# -- what is made from the code ---------------------------------------------------------------------------------------


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Make a Markdown table. A cell may contain `|`."""
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def plain(text: str) -> str:
    """Escape a text that is no Markdown."""
    return re.sub(r"([\\`*_\[\]])", r"\\\1", text).replace("<", "&lt;")


def options() -> str:
    """Describe every command by purpose: its help, its examples, and all its options in their groups."""
    parts = []
    for purpose in dict.fromkeys(verb.purpose for verb in VERBS):
        parts.append(f"## {purpose}")
        parts += [command(verb) for verb in VERBS if verb.purpose == purpose]
    return "\n\n".join(parts)


def command(verb: Verb) -> str:
    after = f" {verb.positional.value}" if verb.positional else ""
    parts = [f"### {verb.name}", plain(verb.help), f"`clustertool {verb.name} [options]{after}`"]
    if verb.positional:
        parts.append(f"`{verb.positional.value}`: {plain(verb.positional.help)}")
    if verb.examples:
        parts.append("```sh\n" + "\n".join(f"clustertool {example}" for example in verb.examples) + "\n```")
    for group in dict.fromkeys(option.group for option in verb.options):
        rows = [
            (names(option), plain(option.type), plain(option.text)) for option in verb.options if option.group == group
        ]
        parts.append(table((group, "value", "meaning"), rows))
    return "\n\n".join(parts)


def names(option: Opt) -> str:
    return f"`--{option.name}`" + (f", `-{option.short}`" if option.short else "")


def example_comments() -> dict[str, str]:
    """Map every key of conf.py to the comment above it in conf.py.example."""
    found: dict[str, str] = {}
    comment: list[str] = []
    for line in (ROOT / "conf.py.example").read_text().splitlines():
        if key := re.match(r"(?:# )?([A-Z_]+) = ", line):
            found[key[1]] = " ".join(comment)
            comment = []
        elif line.startswith("# ") and not line.startswith("# --"):
            comment.append(line[2:])
        else:
            comment = []
    return found


def keys() -> str:
    """Describe every key of conf.py with its default and its meaning."""
    comments = example_comments()
    rows = []
    for key, field in KEYS.items():
        if key == "HOSTS":
            default = "required"
        else:
            default = f"`{literal(field.default)}`" if field.default else "not set"
        rows.append((f"`{key}`", default, plain(comments[key])))
    rows += [
        (f"`{key}`", "not set", plain(comments[key]))
        for key, engine in known_engines.settings_keys().items()
        if engine != known_engines.DEFAULT
    ]
    return table(("key", "default", "meaning"), rows)


def literal(value: object) -> str:
    """Write a default as it would stand in conf.py."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def conf_example() -> str:
    return f"```python\n{(ROOT / 'conf.py.example').read_text()}```"


MADE: dict[str, Callable[[], str]] = {
    "the options of all verbs": options,
    "the keys of conf.py": keys,
    "conf.py.example": conf_example,
}


def examples() -> Iterator[tuple[str, str]]:
    """(path, text) of a page for each example workspace, and of their list."""
    lines = [
        "# Examples",
        "",
        "Each of these workspaces trains. They are in `workspaces/` of the repository.",
        "",
    ]
    for folder in sorted(path for path in (ROOT / "workspaces").iterdir() if path.is_dir()):
        files = [path for path in sorted(folder.iterdir()) if path.suffix in _CODE_SUFFIXES]
        blocks = [f"## {path.name}\n\n```{_CODE_SUFFIXES[path.suffix]}\n{path.read_text()}```" for path in files]
        yield f"examples/{folder.name}.md", "\n\n".join([f"# {folder.name}", *blocks]) + "\n"
        lines.append(f"- [{folder.name}]({folder.name}.md)")
    yield "examples/index.md", "\n".join(lines) + "\n"


def decisions() -> str:
    """Make the page that lists the records of decisions."""
    lines = ["# Decisions", "", "Each record has the context of a decision, the decision, and its consequences.", ""]
    paths = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    numbers = {int(path.name[:4]) for path in paths}
    missing = [str(number) for number in range(1, max(numbers)) if number not in numbers]
    if missing:
        lines += [f"These numbers were reserved, and no record has them: {', '.join(missing)}.", ""]
    for path in paths:
        lines.append(f"- [{title(path.read_text())}]({path.name})")
    return "\n".join(lines) + "\n"


# -- pages ------------------------------------------------------------------------------------------------------------


def title(text: str) -> str:
    """Find the first heading of a page. Raises ValueError if it has none."""
    found = re.search(r"^# (.+)$", text, re.M)
    if not found:
        raise ValueError("a page without a heading")
    return found[1]


def pages() -> dict[str, str]:
    """Make all pages of the site: path below the site's root -> Markdown."""
    found = {}
    for path in sorted(DOCS.rglob("*.md")):
        file = path.relative_to(ROOT).as_posix()
        found[path.relative_to(DOCS).as_posix()] = on_site(path.read_text(), file)
    for file, page in OUTSIDE.items():
        if file.endswith(".md") and page not in found and (ROOT / file).exists():
            found[page] = on_site((ROOT / file).read_text(), file)
    found.update(examples())
    found["decisions/index.md"] = decisions()
    return found


def on_site(text: str, file: str) -> str:
    """Convert a page to what the site has: parts from the code filled in, links from `file` in the repository to pages."""
    page = page_of(file)
    assert page

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        label = _LINK.sub(link, label)
        there = page_of(posixpath.normpath(posixpath.join(posixpath.dirname(file), target)))
        return f"[{label}]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{anchor})" if there else label

    text = _MADE.sub(lambda match: MADE[match[1]](), text)
    code = [match.span() for match in _FENCE.finditer(text)]
    parts, end = [], 0
    for start, stop in code:
        parts += [_LINK.sub(link, text[end:start]), text[start:stop]]
        end = stop
    return "".join(parts) + _LINK.sub(link, text[end:])


def page_of(file: str) -> str:
    """Return the path on the site of a file of the repository; "" where it has none. Raises ValueError for a missing file."""
    if not (ROOT / file).exists():
        raise ValueError(f"{file} is not there")
    if file in OUTSIDE:
        return OUTSIDE[file]
    if file.startswith("workspaces/"):
        return f"examples/{file.split('/')[1]}.md"
    return file[len("docs/") :] if file.startswith("docs/") and file.endswith((".md", ".png")) else ""


def navigation(entry: Any, texts: dict[str, str]) -> list[str]:
    """Write an entry of the navigation as TOML, patterns replaced by the pages that match.

    Raises ValueError for a missing page.
    """
    if isinstance(entry, dict):
        ((name, value),) = entry.items()
        if isinstance(value, list):
            inner = ", ".join(part for each in value for part in navigation(each, texts))
            return [f"{{ {json.dumps(name, ensure_ascii=False)} = [{inner}] }}"] if inner else []
        if value not in texts:
            raise ValueError(f"docs/zensical.toml: {value} is no page")
        return [f"{{ {json.dumps(name, ensure_ascii=False)} = {json.dumps(value)} }}"]
    found = sorted(page for page in texts if Path(page).match(entry) and page.count("/") == entry.count("/"))
    if not found and "*" not in entry:
        raise ValueError(f"docs/zensical.toml: {entry} is no page")
    return [f"{{ {json.dumps(title(texts[page]), ensure_ascii=False)} = {json.dumps(page)} }}" for page in found]


def write(folder: Path) -> None:
    """Write the pages and the configuration for Zensical. Raises ValueError for a link or an entry that leads nowhere."""
    texts = pages()
    config = (DOCS / "zensical.toml").read_text()
    entries = [part for entry in tomllib.loads(config)["project"]["nav"] for part in navigation(entry, texts)]
    nav = "nav = [\n" + "".join(f"  {entry},\n" for entry in entries) + "]"
    shutil.rmtree(folder, ignore_errors=True)
    for page, text in texts.items():
        path = folder / "pages" / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in DOCS.rglob("*.png"):
        shutil.copy(path, folder / "pages" / path.relative_to(DOCS))
    (folder / "zensical.toml").write_text(re.sub(r"^nav = \[.*?^\]", lambda _: nav, config, flags=re.M | re.S))


def build(folder: Path) -> int:
    """Build FOLDER/site of what write() has written. Returns 1 if there is a warning."""
    argv = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(folder / "zensical.toml")]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:  # its own traceback says no more than that there were warnings
        print((done.stdout + done.stderr).partition("Traceback (most recent call last)")[0], file=sys.stderr)
        return 1
    print(f"{folder / 'site/index.html'}: {len(list((folder / 'site').rglob('*.html')))} pages")
    return 0


def main() -> int:
    folder = Path(sys.argv[1])
    try:
        write(folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return build(folder)


if __name__ == "__main__":
    sys.exit(main())
