"""The pages agree with the code: commands exist, blocks are run or say why not, tables have what the code has."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from clustertool import errors
from clustertool.cli.verb_table import COMMON, VERBS
from clustertool.engines import known_engines
from clustertool.model.config import job_tables
from clustertool.model.config.cluster import KEYS
from clustertool.verbs.clusterrun import OWN
from tests import pages
from tests.cli import REPO
from tests.pages import PAGES, Block, blocks_of, commands_in_prose, commands_of, source_of

VERB = {verb.name: verb for verb in VERBS}
CHOICES = {choice for option in COMMON for choice in option.choices}
CORE = {f"--{option.name}" for option in COMMON} | {
    f"-{option.short}" for option in COMMON if option.short
}  # of each verb
# Of conf.py, with the dicts of the engines that have settings.
ALL_KEYS = {*KEYS, *(key for key, engine in known_engines.settings_keys().items() if engine != known_engines.DEFAULT)}
HOW = "CONTRIBUTING.md, 'Write a page', describes how to mark a block that cannot be typed on the embedded cluster"
# What a block that is run may begin a line with, and what it must not name.
TYPED = {".", "cat", "cd", "cp", "echo", "ls", "mkdir", "python3", "seq", "inv", "clusterrun", "clustertool"}
OTHER_HOSTS = re.compile(r"https?:|@|--ips|--hostfile|\s-H\s|\b(?!127\.)\d+\.\d+\.\d+\.\d+\b|\bnode\d*\[?\d")
# test_launchers.py compares the tables of this page with the code
LAUNCHERS = (REPO / "docs/coming-from-fleetrun.md").read_text().replace("_", "-")
TARGETS = set(re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), re.M))


def names(page: Path) -> str:
    return str(page.relative_to(REPO))


def options_of(command: list[str]) -> set[str]:
    """The options of a command line as the tool calls them; arguments of the user's own program are not among them."""
    program, *tokens = command
    verb = next((VERB[token] for token in tokens if token in VERB), None)
    rest = verb is not None and verb.positional is not None and verb.positional.rest
    values = {f"--{opt.name}" for opt in (verb.options if verb else ()) if opt.default is not False}
    values |= {f"-{opt.short}" for opt in (verb.options if verb else ()) if opt.short and opt.default is not False}
    found: set[str] = set()
    before = ""
    for token in tokens:
        if program == "clusterrun" and token.endswith(".py"):
            break
        if token.startswith("-"):
            option = token.partition("=")[0]
            before = option.replace("_", "-") if option.startswith("--") else option
            found.add(before)
            before = "" if "=" in token else before
        elif rest and token not in VERB and before not in values:
            break
        else:
            before = ""
    return found


def unknown(command: list[str]) -> list[str]:
    """What a command contains that does not exist."""
    program, *tokens = command
    if program == "make":
        return [token for token in tokens if token not in TARGETS | {"..."} and "=" not in token]
    options = options_of(command)
    if program == "clusterrun":
        known = {f"--{opt.name}" for opt in OWN} | set(re.findall(r"`(--?[\w-]+)", LAUNCHERS))
        return sorted(options - known - CORE)
    verb = next((token for token in tokens if token in VERB), "")
    if not verb:
        known = CORE | CHOICES | {"help", "verb", "VERB", "dev.check"}
        return [token for token in tokens if not set(token.split("|")) <= known]
    known = {f"--{opt.name}" for opt in VERB[verb].options} | {f"-{opt.short}" for opt in VERB[verb].options}
    return sorted(options - known - CORE)


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_commands_exist(page: Path) -> None:
    """Each command of a block and of the text: its verb, its options, its target of make."""
    commands = [command for block in blocks_of(page) if block.language == "sh" for command in commands_of(block.text)]
    found = {" ".join(command): unknown(command) for command in [*commands, *commands_in_prose(page)]}
    assert {command: tokens for command, tokens in found.items() if tokens} == {}


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_blocks_of_commands_are_run_or_marked(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language not in ("bash", "shell", "console", "zsh"), f"{block.where}: write ```sh"
        if block.language != "sh":
            assert not re.search(r"^\$ |^(clustertool|clusterrun|inv) ", block.text, re.M), (
                f"{block.where}: write ```sh"
            )
        elif block.mark.startswith("tested by "):
            assert untested(block) == {}, f"{block.where}: {HOW}"
        elif block.mark.startswith("not run"):
            assert re.fullmatch(r"not run: .{10,}", block.mark), f"{block.where}: give a reason"
        else:
            assert re.fullmatch(r"(exits with \d+)?", block.mark), f"{block.where}: {block.mark!r} is no known mark"
            first = {line.split()[0] for line in block.text.splitlines() if line.strip() and not line.startswith("#")}
            assert first <= TYPED and not OTHER_HOSTS.search(block.text), f"{block.where}: {block.text}\n{HOW}"


def untested(block: Block) -> dict[str, list[str]]:
    """The commands of a block whose verb or options the named tests do not contain."""
    text = "\n".join(source_of(test) for test in block.mark.removeprefix("tested by ").split())
    commands = commands_of(block.text)
    assert commands, f"{block.where}: no command that a test can contain"
    return {
        " ".join(c): missing for c in commands if (missing := [w for w in essence(c) if not any(f in text for f in w)])
    }


def essence(command: list[str]) -> list[tuple[str, ...]]:
    """The verb or target and the options of a command, each in the forms in which a test may write it."""
    program, *tokens = command
    if program == "make":
        return [(f"make {token}", f'"make", "{token}"') for token in tokens]
    verb = next((token for token in tokens if token in VERB), "")
    forms = [(f'"{verb}"', f" {verb} ", f"{verb}(")] if verb else []
    shorts = {f"--{opt.name}": f'"-{opt.short}"' for opt in (VERB[verb].options if verb else ()) if opt.short}
    for option in sorted(options_of(command)):
        forms.append((option, option.replace("-", "_").replace("__", "--", 1), shorts.get(option, option)))
    return forms


def test_marks_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block without a mark is run; a named test must exist and contain the command."""
    monkeypatch.setattr(pages, "REPO", tmp_path)
    (tmp_path / "test_x.py").write_text('def test_one(site):\n    site.inv("status", "--json")\n')
    page = tmp_path / "page.md"
    block = "```sh\nclustertool status --json   # a comment\n```\n"
    page.write_text(f"{block}\n<!-- tested by test_x.py::test_one -->\n\n{block}\ntext\n\n{block}")
    first, second, third = blocks_of(page)
    assert (first.runs, second.runs, third.runs, third.line) == (True, False, True, 13)
    assert untested(second) == {}
    page.write_text("<!-- tested by test_x.py -->\n```sh\nclustertool jobs\n```\n")
    assert list(untested(blocks_of(page)[0])) == ["clustertool jobs"]
    with pytest.raises(AssertionError, match="no function test_two"):
        source_of("test_x.py::test_two")
    assert unknown(["clustertool", "stat"]) == ["stat"]
    assert unknown(["inv", "status", "--jobs"]) == ["--jobs"]
    assert unknown("clustertool run --workspace job --detached train.py --lr 0.1".split()) == ["--detached"]
    assert unknown(["clusterrun", "--gpus=0", "--gpu=1", "train.py", "--lr"]) == ["--gpu"]


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_python_and_toml_can_be_read(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            compile(block.text, block.where, "exec")
        elif block.language == "toml":
            tomllib.loads(block.text)


def test_keys_in_examples_of_conf_py_exist() -> None:
    """A block of Python that only assigns to names in capitals is a conf.py."""
    found = {}
    for block in (block for page in PAGES for block in blocks_of(page) if block.language == "python"):
        body = ast.parse(block.text).body
        keys = [
            target.id
            for one in body
            if isinstance(one, ast.Assign)
            for target in one.targets
            if isinstance(target, ast.Name)
        ]
        if len(keys) == len(body) and all(key.isupper() for key in keys):
            found[block.where] = keys
    assert found
    assert {where: set(keys) - ALL_KEYS for where, keys in found.items() if set(keys) - ALL_KEYS} == {}


def test_options_in_the_table_of_commands_exist() -> None:
    rows = re.findall(
        r"^\| (`[a-z.]+[ `].*?) \| ", (REPO / "docs/reference.md").read_text().partition("\n## conf.py")[0], re.M
    )
    commands = [part.replace("\\|", " ") for row in rows for part in re.findall(r"`([^`]+)`", row)]
    listed = {command: re.findall(r"[\w.]+", command)[0] for command in commands}
    assert set(VERB) == set(listed.values())
    wrong = {
        c: unknown(["clustertool", verb, *re.findall(r"(?<![\w-])--?[a-z][\w-]*", c)]) for c, verb in listed.items()
    }
    assert {command: options for command, options in wrong.items() if options} == {}


def test_the_chinese_page_has_the_same_blocks() -> None:
    """So the blocks of the English page, which are run, are a test of both."""
    english, chinese = (
        [_plain(b) for b in blocks_of(REPO / "docs" / f)] for f in ("first-run.md", "zh-CN/first-run.md")
    )
    assert chinese == english


def _plain(block: Block) -> tuple[str, str, str, str]:
    return block.language, block.title, block.mark, re.sub(r" +# .*", "", block.text)


# -- the reference ----------------------------------------------------------------------------------------------------


def test_exit_codes_are_those_of_the_errors() -> None:
    text = (REPO / "docs/reference.md").read_text()
    table = re.search(r"^\| exit code \|.*?\n\n", text, re.M | re.S)
    assert table
    listed = {
        int(code) for row in table[0].strip().splitlines()[2:] for code in re.findall(r"\b\d+\b", row.split("|")[1])
    }
    classes = [errors.ClustertoolError]
    for cls in classes:
        classes += cls.__subclasses__()
    codes = {cls.code for cls in classes}
    assert listed - {0, 126, 127, 128} == codes  # 0: done; the others belong to the job's own command


def test_keys_of_job_toml_are_those_of_the_reference() -> None:
    example = next(b for b in blocks_of(REPO / "docs/reference.md") if b.language == "toml" and "mode" in b.text)
    documented = set(re.findall(r"^\[?(\w+)", example.text, re.M))
    documented |= set(re.findall(r"\w+", " ".join(re.findall(r"#.*also (.*)", example.text))))
    keys = {"mode", "env", *job_tables._TABLES, *(key for table in job_tables._TABLES.values() for key in table)}
    assert keys - documented == set()


@pytest.fixture(scope="module")
def site() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", REPO / "scripts/make-docs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_has_all_options_and_keys(site: ModuleType, tmp_path: Path) -> None:
    site.write(tmp_path / "out")
    made = tmp_path / "out/pages"
    options = (made / "reference/options.md").read_text()
    for name, verb in VERB.items():
        section = options.partition(f"\n### {name}\n")[2].partition("\n### ")[0]
        assert [opt.name for opt in verb.options if f"`--{opt.name}`" not in section] == [], name
    conf = (made / "reference/conf-py.md").read_text()
    rows = {
        row.split("|")[1].strip(" `"): row.split("|")[3].strip() for row in conf.splitlines() if row.startswith("| `")
    }
    assert set(rows) == ALL_KEYS
    assert [key for key, meaning in rows.items() if not meaning] == []
    assert not [page for page in made.rglob("*.md") if re.search("^<!-- made", page.read_text(), re.M)]


def test_every_page_is_in_the_navigation(site: ModuleType, tmp_path: Path) -> None:
    site.write(tmp_path / "out")
    nav = (tmp_path / "out/zensical.toml").read_text()
    all_pages = {str(page.relative_to(tmp_path / "out/pages")) for page in (tmp_path / "out/pages").rglob("*.md")}
    assert {page for page in all_pages if f'"{page}"' not in nav} == set(), "add it to docs/zensical.toml"


def test_a_link_that_leads_nowhere_is_an_error(site: ModuleType) -> None:
    with pytest.raises(ValueError, match="docs/nowhere.md is not there"):
        site.on_site("See [this](nowhere.md).", "docs/index.md")
    text = "[a](../conf.py.example) [b](reference.md#json-answers) [c](../setup.cfg)\n```\n[d](x)\n```"
    there = "[a](reference/conf-py.md) [b](reference.md#json-answers) c\n```\n[d](x)\n```"
    assert site.on_site(text, "docs/index.md") == there
