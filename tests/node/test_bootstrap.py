"""The start of the node side: whatever the login and the node's Python are like, it starts or says why not."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clustertool.errors import ClustertoolError, InternalError, PreflightError, Unreachable
from clustertool.fleet import node_bundle
from clustertool.model.wire.messages import REQUESTS
from tests.node.harness import Bench, Client, Node, old_pythons
from tests.node_code import NodeCode

ARCHIVE = 10_000  # bytes; what a start sends without the archive is far less
SHORT = 12  # bare starts of Python whose CPU time a short command may take on a node
FIRST = 50  # the same for what the first use of a version adds


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
    """The directory with the code."""
    (path,) = cache(home).glob(f"{node_bundle.digest()}.*")
    return path


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
    before = contents(kept(fresh))
    sources = {name for name in before if name.endswith(".py")}
    compiled = {name.rpartition("/")[2].split(".")[0] for name in before if name.endswith(".pyc")}
    assert "clustertool/node/agent/loop.py" in sources and compiled == {Path(name).stem for name in sources}
    assert {mode for mode, _ in before.values()} == {0o600} and cache(fresh).stat().st_mode & 0o777 == 0o700
    where.open().ask("probe", root_dir=str(where.root))
    works(bench, where)
    assert contents(kept(fresh)) == before, "what is compiled once is not compiled or written again"


def _without_bz2(bench: Bench) -> Path:
    """A Python as it is built on a machine that has no libbz2."""
    python = bench.tmp / "python-without-bz2"
    code = 'import sys; sys.modules["bz2"] = None; exec(sys.argv[3])'
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -ESs -c '{code}' \"$@\"\n")
    python.chmod(0o755)
    return python


def test_a_python_without_bz2_gets_zlib(
    bench: Bench, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the node, or on the laptop."""
    (where,) = bench.nodes(1, python=str(_without_bz2(bench)), env={"HOME": str(fresh)})
    client = where.open()
    assert client.link.channels[-1].sent > len(node_bundle.packed("need zlib"))
    assert where.probe()["problems"] == [] and not fetched(where.open())
    (tmp_path / "second").mkdir()
    monkeypatch.setattr(node_bundle, "bz2", None)
    client = node(bench, tmp_path / "second").open()
    assert client.link.channels[-1].sent > len(node_bundle.packed("need zlib"))


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Mode and time of each file."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found[str(path.relative_to(folder))] = path.stat().st_mode & 0o7777, path.stat().st_mtime_ns
    return found


def _other_owner(path: Path) -> None:
    if os.getuid():
        pytest.skip("needs root")
    os.chown(path, 65534, 65534)


def _linked(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to("real")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "open to all": lambda path: path.chmod(0o666),
    "another user's": _other_owner,
    "a link": _linked,
}


MODULE, COMPILED = "clustertool/node/agent/loop.py", "clustertool/node/probe/__pycache__/probe.*.pyc"
DAMAGED = [(name, damage) for name in (MODULE, COMPILED) for damage in DAMAGES]
DAMAGED += [("FILES", damage) for damage in ("gone", "empty", "cut")]


@pytest.fixture
def installed(fresh: Path, node_code: NodeCode) -> Path:
    """A home that has the code."""
    cache(fresh).mkdir(mode=0o700, parents=True)
    shutil.copytree(node_code.place, cache(fresh) / node_code.name)
    return fresh


def test_a_start_finds_a_damaged_directory(installed: Path) -> None:
    """A quota that is used up, a crash, or a tool that tidies up: the code is wanted again."""

    def answer() -> bytes:
        start = node_bundle.LOADER + node_bundle.digest().encode() + node_bundle.with_size(b"{}")
        argv = [sys.executable, "-ESs", "-c", node_bundle.FIRST]
        return subprocess.run(argv, input=start, env={"HOME": str(installed)}, capture_output=True, check=False).stdout

    for name, damage in DAMAGED:
        (path,) = kept(installed).glob(name)
        content, mode = path.read_bytes(), path.stat().st_mode
        DAMAGES[damage](path)
        assert answer() == b"need bz2\n", (name, damage)
        for left in (path, path.with_name("real")):
            left.unlink(missing_ok=True)
        path.write_bytes(content)
        path.chmod(mode)
    assert answer() == b"", "each was undone"


@pytest.mark.parametrize(
    "name, damage",
    [
        (MODULE, "cut"),
        pytest.param(COMPILED, "another user's", marks=pytest.mark.chaos),  # the test above has how each is found
        pytest.param("FILES", "gone", marks=pytest.mark.chaos),
    ],
)
def test_a_damaged_directory_is_made_again(bench: Bench, installed: Path, name: str, damage: str) -> None:
    """The code is sent again, and whole again."""
    where = node(bench, installed)
    good = {name: mode for name, (mode, _) in contents(kept(installed)).items()}
    (path,) = kept(installed).glob(name)
    DAMAGES[damage](path)
    assert fetched(where.open())
    assert where.probe()["problems"] == []
    assert {name: mode for name, (mode, _) in contents(kept(installed)).items()} == good
    assert not fetched(where.open())
    assert list(cache(installed).iterdir()) == [kept(installed)], "the damaged one is removed"


def test_a_directory_that_others_can_change_is_made_again(bench: Bench, installed: Path) -> None:
    where = node(bench, installed)
    assert not fetched(where.open())
    (kept(installed) / "clustertool/node").chmod(0o777)
    assert fetched(where.open())
    assert (kept(installed) / "clustertool/node").stat().st_mode & 0o777 == 0o700
    kept(installed).chmod(0o770)
    assert fetched(where.open())
    assert not fetched(where.open())


def test_what_is_old_is_thrown_out(bench: Bench, fresh: Path) -> None:
    """When something new comes, and nothing but what is ours. What a command has used is not old."""
    cache(fresh).mkdir(parents=True, mode=0o700)
    names = [f"{'0' * 32}.cpython-38-1", f"{'1' * 32}.cpython-38-1", f"{'2' * 32}.pyz", "notes", "new-abc"]
    old, young, former, other, part = (cache(fresh) / name for name in names)
    for path in (old, young, other, part):
        (path / "clustertool").mkdir(parents=True)
    former.write_text("x")
    long_ago = time.time() - 31 * 86400
    for path in (old, former, other, part):
        os.utime(path, (long_ago, long_ago))
    where = node(bench, fresh)
    where.open()
    assert [path.exists() for path in (old, young, former, other, part)] == [False, True, False, True, False]
    os.utime(kept(fresh), (long_ago, long_ago))
    assert not fetched(where.open())
    assert time.time() - kept(fresh).stat().st_mtime < 3600


def test_two_versions(bench: Bench, fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Laptops with different versions of the tool use one cluster: each has its own directory."""
    where = node(bench, fresh)
    first = where.open()
    ours = kept(fresh)
    data = node_bundle._content()[1].replace(b"clustertool runs", b"clustertool once ran")
    monkeypatch.setattr(node_bundle, "_content", lambda: (node_bundle.digest_of(data), data))
    node_bundle._packed.cache_clear()
    try:
        assert [fetched(where.open()) for _ in range(2)] == [True, False]
        assert "once ran" in (kept(fresh) / "clustertool/__init__.py").read_text()
        assert sorted(cache(fresh).iterdir()) == sorted([ours, kept(fresh)])
    finally:
        monkeypatch.undo()
        node_bundle._packed.cache_clear()
    assert first.ask("jobs")["jobs"] == [] and not fetched(where.open())


def test_a_traceback_shows_the_code(bench: Bench, fresh: Path) -> None:
    """By the names of real files."""
    client = node(bench, fresh).open()
    where = rf"{kept(fresh)}/clustertool/node/probe/shared_root.py"
    with pytest.raises(InternalError, match=rf'{where}", line \d+, in meet\n +ours, name = '):
        client.ask("meet", step="leave")


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.chaos)])
def test_first_starts_at_once(bench: Bench, fresh: Path, count: int) -> None:
    """As on nodes that share one home."""
    nodes = [node(bench, fresh) for _ in range(count)]
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
    assert list(cache(fresh).iterdir()) == [kept(fresh)]


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


# One that nothing can be written to, and one that the loader refuses; the others of each kind take the same path.
_OTHER_HOMES = [pytest.param(number, marks=pytest.mark.chaos) for number in (1, 2, 4)[: 2 + (os.getuid() == 0)]]


@pytest.mark.parametrize("number", [0, 3, *_OTHER_HOMES])
def test_from_a_temporary_directory(bench: Bench, fresh: Path, number: int) -> None:
    """It is removed with the agent; a job that goes on needs none of it."""
    why, home = list(homes(fresh))[number]
    where = node(bench, home)
    client = where.open()
    assert fetched(client), why
    with pytest.raises(InternalError) as caught:
        client.ask("meet", step="leave")
    folder = Path(re.search(r"/tmp/clustertool-code-[^/]+", caught.value.what)[0])  # type: ignore[index]
    assert folder.stat().st_uid == os.getuid() and folder.stat().st_mode & 0o777 == 0o700
    if number:  # the rest is the same for all homes
        client.close()
        assert not folder.exists()
        assert not (fresh / "nowhere").exists()
        assert not list((fresh / "open").rglob("*.py"))
        return
    job = bench.run([where], "until [ -e go ]; do sleep 0.2; done; exit 3")
    client.close()
    assert not folder.exists()
    (job.dir() / "go").touch()
    assert job.ended()["code"] == 3
    assert not (job.dir() / ".clustertool/supervisor.err").read_text()
    assert fetched(where.open()), why


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
    with pytest.raises(PreflightError, match="prints too much"):
        where.open()


def test_login_ends_at_once(bench: Bench) -> None:
    where = bench.nodes(1)[0]
    where.shell = ["/bin/sh", "-c", "echo this account is closed >&2; exit 1"]
    with pytest.raises(Unreachable, match="ended with exit code 1 .*this account is closed") as caught:
        where.open()
    assert ".bashrc" in caught.value.fix


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


@pytest.mark.skipif(
    subprocess.run(["unshare", "--map-user=9999", "true"], capture_output=True).returncode != 0,
    reason="no user namespaces",
)
def test_a_user_without_an_entry_and_without_home(bench: Bench, fresh: Path) -> None:
    """With HOME it starts; without, too, but ROOT_DIR must not begin with ~."""
    stranger = ["unshare", "--map-user=9999", "--map-group=9999"]
    machine = node(bench, fresh)
    machine.shell = [*stranger, "/bin/sh"]
    assert machine.probe()["user"] == "9999"
    machine = node(bench, fresh)
    machine.shell = [*stranger, "env", "-u", "HOME", "/bin/sh"]
    assert machine.probe()["user"] == "9999"
    machine = node(bench, fresh)
    machine.shell = [*stranger, "env", "-u", "HOME", "/bin/sh"]
    machine.cluster = replace(machine.cluster, hosts=(replace(machine.host, root_dir="~/clustertool"),))
    with pytest.raises(PreflightError, match="HOME is not set, and the user has no home folder"):
        machine.probe()
    assert not (Path.cwd() / "~").exists()


def test_python_that_breaks(bench: Bench) -> None:
    """Its own last lines are reported."""
    broken = bench.tmp / "python"
    broken.write_text("#!/bin/sh\necho libpython3.9.so: cannot open shared object file >&2\nexit 127\n")
    broken.chmod(0o755)
    with pytest.raises(PreflightError, match="did not run: libpython3.9.so: cannot open shared object file"):
        bench.nodes(1, python=str(broken))[0].open()


def test_python_below_home(bench: Bench, installed: Path) -> None:
    """With a path that a shell would like to split."""
    (installed / "my $HOME 'venv'").mkdir()
    (installed / "my $HOME 'venv'" / "python").symlink_to(sys.executable)
    where = bench.nodes(1, python="~/my $HOME 'venv'/python", env={"HOME": str(installed)})[0]
    assert where.probe()["home"] == str(installed)


def test_the_bundle_is_reproducible() -> None:
    """The same sources are the same bundle, so that a second laptop sends nothing."""
    code = "from clustertool.fleet import node_bundle as b; print(b.digest(), b.digest_of(b.packed('need bz2')))"
    ours = f"{node_bundle.digest()} {node_bundle.digest_of(node_bundle.packed('need bz2'))}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ours


def sent() -> dict[str, str]:
    """The files of the bundle."""
    parts = node_bundle._content()[1].decode().split("\0")
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_the_bundle_has_nothing_that_only_joining_machines_need() -> None:
    files = sent()
    assert not [name for name in files if name.startswith(("clustertool/node/join/", "clustertool/model/joining/"))]


def test_the_bundle_has_what_its_modules_import_and_no_other_module() -> None:
    """Beginning with the agent, the handlers of requests, and the programs of mpirun (node/mpi/launcher_scripts.py)."""
    files = sent()
    modules = {name[:-3].replace("/", "."): text for name, text in files.items()}
    needed = {f"clustertool.node.{kind.handler.partition(':')[0]}" for kind in REQUESTS.values()}
    needed |= {"clustertool.node.agent.loop", "clustertool.node.mpi.launch_agent", "clustertool.node.mpi.rank_wrapper"}
    pending = list(needed)
    while pending:
        for name in imported(modules[pending.pop()]):
            assert name in modules or f"{name}.__init__" in modules or not is_module(name), f"{name} is not sent"
            if name in modules and name not in needed:
                needed.add(name)
                pending.append(name)
    assert {name for name in modules if not name.endswith("__init__")} <= needed


def imported(text: str) -> set[str]:
    """The names below clustertool that a module imports at run time, those too that it loads by a text."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(text)]
    while pending:
        one = pending.pop()
        if isinstance(one, ast.ImportFrom) and one.module:
            found |= {one.module, *(f"{one.module}.{alias.name}" for alias in one.names)}
        elif isinstance(one, ast.Import):
            found |= {alias.name for alias in one.names}
        elif isinstance(one, ast.Call) and ast.unparse(one.func).endswith("load_on_demand"):
            found |= {
                f"clustertool.node.{place.value.partition(':')[0]}"
                for place in one.args
                if isinstance(place, ast.Constant)
            }
        only_types = isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING"
        pending += [] if only_types else ast.iter_child_nodes(one)
    return {name for name in found if name.startswith("clustertool.")}


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a class or a function
        return False


def test_the_bundle_is_small() -> None:
    """64 nodes share one uplink: the first command of a version may cost 250 kB a node, others hardly more than a login."""
    assert len(node_bundle.packed("need bz2")) < 255_000
    assert len(node_bundle.packed("need zlib")) < 340_000
    assert len(node_bundle.LOADER) < 2_500


def test_a_start_takes_little_cpu_time(bench: Bench, fresh: Path) -> None:
    """Of several starts the least, in turns with a bare Python: other load on this machine makes all of them slower."""

    def cost(do: Callable[[], object]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        do()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def bare() -> float:
        return cost(lambda: subprocess.run([sys.executable, "-ESs", "-c", "pass"], check=True))

    def asked(where: Node, name: str, **fields: object) -> float:
        def ask() -> None:
            client = where.open()
            client.ask(name, **fields)
            client.close()

        return cost(ask)

    homes = [fresh / name for name in "ab"]
    for home in homes:
        home.mkdir(mode=0o700)
    bare()  # each start also waits for processes of earlier tests that have ended, and would be charged for them
    where = node(bench, homes[0])
    firsts = [asked(where, "jobs")]
    requests: dict[str, dict[str, object]] = {
        "jobs": {},
        "probe": {"root_dir": str(where.root)},
        "patch": {"release": "r", "base": "b", "steps": [], "manifest": "m", "groups": None, "pieces": {}},
    }
    least = dict.fromkeys([*requests, "bare"], 60.0)
    for number in range(5):
        least["bare"] = min(least["bare"], bare())
        for name, fields in requests.items():
            least[name] = min(least[name], asked(where, name, **fields))
        short = max(least[name] for name in requests) < SHORT * least["bare"]
        if number == 1 and firsts[0] >= least["jobs"] + FIRST * least["bare"]:
            firsts.append(asked(node(bench, homes[1]), "jobs"))
        if number and short:
            break
    assert short, least
    assert min(firsts) < least["jobs"] + FIRST * least["bare"]
