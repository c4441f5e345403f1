"""The start of the node side: whatever the login and the node's Python are like, it starts or says why not."""

from __future__ import annotations

import ast
import json
import marshal
import os
import shlex
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

from clustertool.errors import ClustertoolError, InternalError, PreflightError, Unreachable
from clustertool.fleet import node_bundle
from clustertool.node.agent.boot import Code
from tests.node.harness import Bench, Client, Node, old_pythons

PACKAGE = Path(node_bundle.__file__).parents[1]
STAND_INS = {path.stem for path in (PACKAGE / "light").glob("[!_]*.py")}
ARCHIVE = 10_000  # bytes; what a start sends without the archive is far less


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """A home that has never seen us."""
    path = tmp_path / "fresh"
    path.mkdir(mode=0o700)
    return path


def node(bench: Bench, home: Path, **given: str) -> Node:
    return bench.nodes(1, env={"HOME": str(home), **given})[0]


def fetched(client: Client) -> bool:
    """Whether this start was sent the archive."""
    return client.link.channels[-1].sent > ARCHIVE


def cache(home: Path) -> Path:
    return home / ".cache" / "clustertool"


def kept(home: Path) -> Path:
    """The first part as it came."""
    return cache(home) / f"{node_bundle.shipped().first.digest}.pyz"


def compiled(home: Path) -> list[Path]:
    return [path for path in cache(home).iterdir() if path.suffix != ".pyz" and not path.name.startswith("boot")]


def works(bench: Bench, where: Node) -> None:
    """A whole job, with what is imported late."""
    job = bench.run([where], "echo hello; exit 3")
    assert job.ended()["code"] == 3
    assert job.log() == b"hello\n"
    assert not (job.dir() / ".clustertool/supervisor.err").read_text()


def test_sent_once(bench: Bench, fresh: Path) -> None:
    """And kept compiled, whatever the user's environment says of that."""
    where = node(bench, fresh, PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX="/nowhere")
    assert [fetched(where.open()) for _ in range(3)] == [True, False, False]
    where.probe()
    (made,) = compiled(fresh)
    before = made.stat().st_ino, made.stat().st_mtime_ns
    assert made.name.startswith(kept(fresh).stem + ".")
    assert made.stat().st_mode & 0o777 == 0o600 and cache(fresh).stat().st_mode & 0o777 == 0o700
    again = where.open()
    again.ask("probe", root_dir=str(where.root))
    assert [(path.stat().st_ino, path.stat().st_mtime_ns) for path in compiled(fresh)] == [before]


def test_content_is_checked(bench: Bench, fresh: Path) -> None:
    """A byte that has changed, a file that is cut, one that is gone: sent again, and whole again, once a Python needs it."""
    where = node(bench, fresh)
    where.open()
    good = kept(fresh).read_bytes()
    kept(fresh).write_bytes(b"")
    assert not fetched(where.open()), "what was made of it is here"
    for bad in (bytes([good[0] ^ 1]) + good[1:], good[:-1] + bytes([good[-1] ^ 1]), good[:1000], b"", None):
        if bad is None:
            kept(fresh).unlink()
        else:
            kept(fresh).write_bytes(bad)
        for path in compiled(fresh):
            path.unlink()
        assert fetched(where.open())
        assert kept(fresh).read_bytes() == good
        assert not fetched(where.open())


def test_damaged_compiled_code(bench: Bench, fresh: Path) -> None:
    """A quota that is used up, or a crash, leaves a file cut short, or zeroes in it: made anew from what came."""
    where = node(bench, fresh)
    where.probe()
    (made,) = compiled(fresh)
    good = made.read_bytes()
    modules = unpacked(good)
    zeroes = good[:100] + bytes(50) + good[150:]
    for bad in (good[:-1], good[:5000], good[:5], good[:4], good[:2], b"", zeroes, bytes(len(good))):
        made.write_bytes(bad)
        assert not fetched(where.open())
        assert where.probe()["problems"] == []
        assert unpacked(made.read_bytes()) == modules


def test_the_boot_is_compiled_once(bench: Bench, fresh: Path) -> None:
    """And again where it is damaged, is another version's, or where others may write."""
    where = node(bench, fresh)
    where.open()
    (boot,) = cache(fresh).glob("boot.*")
    good, made, sent = boot.read_bytes(), boot.stat().st_mtime_ns, node_bundle.shipped().boot
    right = compile(zlib.decompress(sent), "clustertool-boot", "exec", dont_inherit=True)
    where.open()
    assert boot.stat().st_mtime_ns == made
    code = marshal.dumps(compile("raise SystemExit('not ours')", "x", "exec"))
    other = with_crc(zlib.compress(b"raise SystemExit('another version')") + code)
    for bad in (good[:-1], good[:5], b"", bytes(len(good)), good[:900] + b"x" + good[901:], other):
        boot.write_bytes(bad)
        assert where.probe()["problems"] == []
        where.open()
        found = boot.read_bytes()
        assert found == with_crc(sent + found[4 + len(sent) :])
        assert marshal.loads(found[4 + len(sent) :]) == right
    boot.write_bytes(with_crc(sent + code))
    cache(fresh).chmod(0o777)
    where.open()


def unpacked(data: bytes) -> dict[str, tuple[bool, CodeType]]:
    """Compiled code by its module's name. Its bytes differ from one Python to the next: marshal writes down who shares what."""
    code = Code("", lambda: True, "")
    code.take(data)
    return {name: (package, marshal.loads(body)) for name, (package, body) in code.modules.items()}


def with_crc(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big") + data


def test_what_is_old_is_thrown_out(bench: Bench, fresh: Path) -> None:
    """When something new comes, and nothing but what is ours."""
    cache(fresh).mkdir(parents=True, mode=0o700)
    old, young, other = (
        cache(fresh) / f"{'0' * 32}.pyz",
        cache(fresh) / f"{'1' * 32}.cpython-38-1",
        cache(fresh) / "notes.txt",
    )
    for path in (old, young, other):
        path.write_text("x")
    long_ago = time.time() - 31 * 86400
    for path in (old, other):
        os.utime(path, (long_ago, long_ago))
    node(bench, fresh).open()
    assert [path.exists() for path in (old, young, other)] == [False, True, True]


def test_a_traceback_shows_the_code(bench: Bench, fresh: Path) -> None:
    """Though it is imported from no file that is there."""
    client = node(bench, fresh).open()
    with pytest.raises(InternalError, match=r'node/agent/loop.py", line \d+, in meet\n +return shared_root\.meet\('):
        client.ask("meet", step="leave")


def test_eight_first_starts_at_once(bench: Bench, fresh: Path) -> None:
    """As on nodes that share one home."""
    nodes = [node(bench, fresh) for _ in range(8)]
    failed: list[ClustertoolError] = []

    def start(one: Node) -> None:
        try:
            one.open().ask("probe", root_dir=str(one.root))
        except ClustertoolError as error:
            failed.append(error)

    threads = [threading.Thread(target=start, args=(one,)) for one in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert not fetched(nodes[0].open())
    assert sorted(path.suffix[:8] for path in cache(fresh).iterdir()) == [".cpython", ".cpython", ".pyz"]


def homes(fresh: Path) -> Iterator[tuple[str, Path]]:
    """Homes that take nothing, also from root."""
    blocked = fresh / "blocked"
    blocked.mkdir()
    (blocked / ".cache").touch()
    yield "a file is in the way", blocked
    yield "there is none", fresh / "nowhere"
    yield "it can never be written to", Path("/proc")
    open_to_all = fresh / "open"
    (open_to_all / ".cache/clustertool").mkdir(parents=True)
    (open_to_all / ".cache/clustertool").chmod(0o777)
    yield "others may write there", open_to_all
    if os.getuid() == 0:
        foreign = fresh / "foreign"
        (foreign / ".cache/clustertool").mkdir(parents=True)
        os.chown(foreign / ".cache/clustertool", 65534, 65534)
        yield "it is another user's", foreign


@pytest.mark.parametrize("number", range(4 + (os.getuid() == 0)))
def test_from_memory(bench: Bench, fresh: Path, number: int) -> None:
    why, home = list(homes(fresh))[number]
    where = node(bench, home)
    assert fetched(where.open()), why
    works(bench, where)
    assert fetched(where.open()), why
    assert not (fresh / "nowhere").exists()


def test_nothing_of_the_user_is_imported(bench: Bench, fresh: Path) -> None:
    """Not from the working directory, not by PYTHON* variables, not from the user's site-packages."""
    trap = bench.tmp / "trap"
    (trap / "clustertool").mkdir(parents=True)
    for name in ("json.py", "os.py", "socket.py", "sitecustomize.py", "clustertool/__init__.py"):
        (trap / name).write_text(f"open({str(bench.tmp / 'caught')!r}, 'w').close()\nraise SystemExit(9)\n")
    wishes = {
        "PYTHONPATH": str(trap),
        "PYTHONHOME": "/nowhere",
        "PYTHONSTARTUP": str(trap / "json.py"),
        "PYTHONINSPECT": "1",
    }
    where = node(bench, fresh, **wishes)
    where.shell = ["/bin/sh", "-c", f"cd {trap}; exec /bin/sh"]
    works(bench, where)
    assert not (bench.tmp / "caught").exists()


@pytest.mark.parametrize("noise", ["Welcome", "no newline", "many", "binary", "looks like a mark"])
def test_noise_before_the_start(bench: Bench, noise: str) -> None:
    """What a .bashrc prints, and what it leaves in the pipe's way."""
    text = {
        "Welcome": "echo Welcome; echo to the machine >&2",
        "no newline": "printf 'no newline'",
        "many": "seq 5000",
        "binary": r"printf '\000\377\033[31m'",
        "looks like a mark": "echo 0123456789abcdef; echo have; echo ready",
    }[noise]
    where = bench.nodes(1)[0]
    where.shell = ["/bin/sh", "-c", f"{text}; exec /bin/sh"]
    assert where.probe()["problems"] == []


def test_noise_without_end(bench: Bench) -> None:
    where = bench.nodes(1)[0]
    where.shell = ["/bin/sh", "-c", "exec yes Welcome"]
    with pytest.raises(PreflightError, match="prints without end"):
        where.open()


def test_login_ends_at_once(bench: Bench) -> None:
    where = bench.nodes(1)[0]
    where.shell = ["/bin/sh", "-c", "echo this account is closed >&2; exit 1"]
    with pytest.raises(Unreachable, match="the session ended at once.*this account is closed"):
        where.open()


@pytest.mark.parametrize(
    "python",
    [pytest.param(path, id=Path(path).name) for path in old_pythons()]
    or [
        pytest.param("", marks=pytest.mark.skip(reason="there is no Python older than 3.8 here")),
    ],
)
def test_too_old(bench: Bench, python: str) -> None:
    version = Path(python).name[len("python") :]
    with pytest.raises(PreflightError, match=rf"is Python {version}\.\d+, too old") as caught:
        bench.nodes(1, python=python)[0].open()
    assert "PYTHON in conf.py" in caught.value.fix


@pytest.mark.parametrize(
    "python, what",
    [
        ("/nowhere/python3", "there is no /nowhere/python3"),
        ("no-such-python", "there is no no-such-python"),
        ("~/no-python", "there is no ~/no-python"),
        ("/etc", "/etc did not run"),
        ("/bin/false", "/bin/false did not run"),
    ],
)
def test_no_python(bench: Bench, python: str, what: str) -> None:
    with pytest.raises(PreflightError) as caught:
        bench.nodes(1, python=python)[0].open()
    assert caught.value.what.partition(": ")[0] == what


def test_python_that_breaks(bench: Bench) -> None:
    """Its own last words are told."""
    broken = bench.tmp / "python"
    broken.write_text("#!/bin/sh\necho libpython3.9.so: cannot open shared object file >&2\nexit 127\n")
    broken.chmod(0o755)
    with pytest.raises(PreflightError, match="did not run: libpython3.9.so: cannot open shared object file"):
        bench.nodes(1, python=str(broken))[0].open()


def test_python_below_home(bench: Bench, fresh: Path) -> None:
    """With a path that a shell would like to split."""
    import sys

    (fresh / "my $HOME 'venv'").mkdir()
    (fresh / "my $HOME 'venv'" / "python").symlink_to(sys.executable)
    where = bench.nodes(1, python="~/my $HOME 'venv'/python", env={"HOME": str(fresh)})[0]
    assert where.probe()["home"] == str(fresh)


def test_archive_is_reproducible() -> None:
    """The same sources are the same release, so that a second laptop sends nothing."""
    sources = node_bundle.sources()
    backwards = dict(reversed(sources.items()))
    assert node_bundle.make(sources) == node_bundle.make(backwards) == node_bundle.shipped()


def test_both_parts_are_small() -> None:
    """64 nodes share one uplink: a dispatch may cost 60 kB a node besides the workspace, of which 6 kB are the login."""
    boot, first, rest = node_bundle.shipped()
    assert len(boot) < 2500
    assert len(first.data) < 52_000
    assert not {"supervisor", "follow", "lead"} & {Path(name).stem for name in json.loads(zlib.decompress(first.data))}
    assert "clustertool/node/supervisor/supervisor.py" in json.loads(zlib.decompress(rest.data))


def test_lean_code_is_the_same_code_on_the_same_lines() -> None:
    for path in sorted((PACKAGE / "node").glob("*.py")):
        text = path.read_text()
        lean = node_bundle.light(node_bundle.lean(text), STAND_INS)
        assert len(lean.splitlines()) == len(text.splitlines())
        assert shape(lean) == shape(text), path
    assert node_bundle.lean('def f():  # x\n    """é\n    ü"""\n    return "# no comment"\n') == (
        'def f():\n    ""\n\n    return "# no comment"\n'
    )


def shape(text: str) -> list[tuple[str, int]]:
    """Every statement and where it stands, but for types, docstrings and imports of what there are stand-ins for."""
    tree = ast.parse(text)
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        Untyped().visit(function)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [one for one in body if not says_nothing(one)] or [ast.Pass(lineno=1)]
    return [(ast.unparse(node), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.stmt)]


class Untyped(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return ast.copy_location(ast.Assign([node.target], node.value), node) if node.value else node


def says_nothing(node: ast.stmt) -> bool:
    if isinstance(node, ast.ImportFrom):
        return str(node.module).startswith("clustertool.light") or node.module in {"__future__", *STAND_INS}
    if isinstance(node, ast.Import):
        return node.names[0].name in STAND_INS
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_types_are_light() -> None:
    """Nothing of typing is imported on a node; what is evaluated there comes from light/typing.py."""
    future, rest = "from __future__ import annotations", ["Names = List[str]", "def f(x: Dict[str, Any]) -> Names: ..."]
    imports = ["from typing import (", "    Any, Dict,", "    List)"]
    shipped = "from clustertool.light.typing import "
    assert node_bundle.light("\n".join([future, *imports, *rest]), ()).splitlines() == [
        '""',
        shipped + "List",
        "",
        "",
        *rest,
    ]
    assert node_bundle.light("\n".join([*imports, *rest]), ()).splitlines() == [
        shipped + "Any, Dict, List",
        "",
        "",
        *rest,
    ]
    assert node_bundle.light(f"{future}\nfrom typing import Any\nx: Any = 1\n", ()) == '""\n""\nx: Any = 1\n'
    assert "from typing" in node_bundle.program("node/probe/framework_probe.py"), "it runs where nothing of ours is"


def test_imports_are_light() -> None:
    text = "import json\nimport os\ndef f():\n    from signal import SIGKILL as K, SIGTERM\n    import json\n"
    light = [
        "from clustertool.light import json",
        "import os",
        "def f():",
        "    from clustertool.light.signal import SIGKILL as K, SIGTERM",
        "    from clustertool.light import json",
    ]
    assert node_bundle.light(text, {"json", "signal"}).splitlines() == light
    assert node_bundle.light(text, ()) == text
    slow = {"__future__", *STAND_INS}
    for part in node_bundle.shipped()[1:]:
        for name, text in json.loads(zlib.decompress(part.data)).items():
            tree = list(ast.walk(ast.parse(text)))
            found = {node.module for node in tree if isinstance(node, ast.ImportFrom)}
            found |= {alias.name for node in tree if isinstance(node, ast.Import) for alias in node.names}
            stood_for = Path(name).stem if "/light/" in name else ""
            assert not found & slow - {stood_for}, name


def test_an_agent_imports_little(bench: Bench, tmp_path: Path) -> None:
    """Many nodes start one at once, and what Python imports is most of what that costs."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -X importtime "$@" 2> "$0.$$"\n')
    python.chmod(0o755)
    (where,) = bench.nodes(1, python=str(python))
    where.open()  # compiles
    client = where.open()
    client.ask("probe", root_dir=str(where.root))
    client.ask("patch", release="r", base="b", steps=[], manifest="m", groups=None, pieces={})
    _, said = sorted(tmp_path.glob("python.*"), key=lambda path: path.stat().st_mtime_ns)
    imported = {line.rpartition("|")[2].strip() for line in said.read_text().splitlines()}
    assert {"clustertool.node.probe.probe", "clustertool.node.storage.patch", "_socket", "_json"} <= imported
    slow = "__future__ collections ctypes enum functools re ssl subprocess threading".split()
    assert not imported & {*STAND_INS, *slow}


def test_a_dispatch_needs_no_more_than_the_first_part(bench: Bench, fresh: Path) -> None:
    """Nor does a probe; the rest comes with the first request that needs it, and only then."""
    where = node(bench, fresh)
    client = where.open()
    where.probe()
    client.ask("meet", step="forget", token="0" * 16, node=0)
    client.ask("patch", release="r", base="b", steps=[], manifest="m", groups=None, pieces={})
    client.ask("relay", release="r", manifest="m", groups=None, helper=False)
    client.ask("unrelay")
    rest = cache(fresh) / f"{node_bundle.shipped().rest.digest}.pyz"
    assert not rest.exists()
    assert client.ask("jobs")["jobs"] == []
    assert rest.exists()
    before = where.open().link.channels[-1].sent
    assert where.ask("jobs")["jobs"] == [] and where.client.link.channels[-1].sent - before < 1000
