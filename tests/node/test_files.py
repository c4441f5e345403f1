"""Files on a node with hostile neighbours, full disks and careless masks."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clustertool.errors import ClustertoolError, NotFound, PreflightError, UsageError
from clustertool.model.dispatch.manifest import name_of, text_of
from clustertool.model.paths import OURS
from clustertool.node.jobs import ledger
from clustertool.node.storage import files, reserving_journal
from clustertool.node.storage.release_store import Store
from clustertool.node.storage.reserving_journal import ReservingJournal
from tests.node import programs as p
from tests.node.harness import Bench, Job, alive, until

OTHER_UID = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to act as a second user")


@pytest.fixture
def open_tmp() -> Iterator[Path]:
    """A directory that other users can reach, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="clustertool-test-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def by_other_user(do: Callable[[], None]) -> None:
    """In a child that is another user."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(OTHER_UID)
            os.setuid(OTHER_UID)
            do()
        except BaseException:  # noqa: BLE001 - the child must not come back
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def modes(job: Job) -> dict[str, str]:
    top = job.dir()
    paths = [top, *(path for path in sorted(top.rglob("*")) if not path.is_symlink())]
    return {str(path.relative_to(top)): oct(path.lstat().st_mode & 0o7777) for path in paths}


@pytest.mark.parametrize("mask", ["022", "077", "000"])
def test_masks(bench: Bench, mask: str) -> None:
    """Everything of ours is for this user alone; what a rank makes, it makes under the user's own mask."""
    nodes = bench.nodes(1)
    nodes[0].shell = ["/bin/sh", "-c", f"umask {mask}; exec /bin/sh"]
    job = bench.run(nodes, "umask; mkdir made; touch made/file; mkfifo fifo")
    job.ended()
    job.gone()
    assert job.log() == f"0{mask}\n".encode()
    found = modes(job)
    made = [found.pop(name) for name in ("made", "made/file", "fifo")]
    assert made == [oct(mode & ~int(mask, 8)) for mode in (0o777, 0o666, 0o666)]
    assert set(found.values()) == {"0o700", "0o600"}, found
    root = job.nodes[0].root
    assert [oct((root / name).stat().st_mode & 0o7777) for name in ("", OURS)] == ["0o700"] * 2


def test_job_directory_is_new(bench: Bench) -> None:
    nodes = bench.nodes(1)
    first = bench.run(nodes, "true", id="one")
    first.ended()
    again = bench.job(nodes, "true", id="one")
    with pytest.raises(UsageError, match="is there already"):
        again.place()
    assert again.nodes[0].ask("unplace", job_dir=str(again.dir()), token=again.token)
    assert first.dir().exists(), "an undo takes back what is its own"


@pytest.mark.parametrize("what", ["link", "file", "dangling"])
def test_planted_job_directory(bench: Bench, what: str) -> None:
    job = bench.job(None, "true")
    trap = bench.tmp / "trap"
    trap.mkdir()
    job.dir().parent.mkdir(parents=True, exist_ok=True)
    if what == "file":
        job.dir().write_text("x")
    else:
        job.dir().symlink_to(trap if what == "link" else bench.tmp / "nowhere")
    with pytest.raises(UsageError, match="is there already"):
        job.place()
    job.nodes[0].ask("unplace", job_dir=str(job.dir()), token=job.token)
    assert job.dir().is_symlink() or job.dir().is_file()
    assert not list(trap.iterdir())


@as_root
@pytest.mark.parametrize("what", ["link", "directory", "file"])
def test_neighbour_plants_our_own_folder(bench: Bench, open_tmp: Path, what: str) -> None:
    """ROOT_DIR/.clustertool in a directory where others may write: made by somebody else it is refused."""
    root, trap = open_tmp / "root", open_tmp / "trap"
    for path in (root, trap):
        path.mkdir()
        path.chmod(0o1777)
    ours = root / OURS
    make = {"link": lambda: ours.symlink_to(trap), "directory": lambda: ours.mkdir(mode=0o777), "file": ours.touch}
    by_other_user(make[what])
    nodes = bench.nodes(1, root=root)
    job = bench.job(nodes, "true")
    with pytest.raises(PreflightError, match="not a directory of yours"):
        job.place()
    assert not list(trap.iterdir()) and not job.dir().exists()


@as_root
def test_neighbour_owns_root(bench: Bench, open_tmp: Path) -> None:
    """A ROOT_DIR of somebody else, and a link that somebody else made, are errors of the probe and of the placing."""
    theirs, link = open_tmp / "theirs", open_tmp / "link"
    theirs.mkdir()
    os.chown(theirs, OTHER_UID, OTHER_UID)
    link.symlink_to(bench.tmp)
    os.lchown(link, OTHER_UID, OTHER_UID)
    for root, why in ((theirs, f"{theirs} belongs to user nobody"), (link, f"{link} belongs to user nobody")):
        nodes = bench.nodes(1, root=root)
        assert [problem[0] for problem in nodes[0].probe()["problems"]] == ["root"]
        job = bench.job(nodes, "true")
        with pytest.raises(PreflightError, match=why):
            job.place()


def test_root_open_to_all(bench: Bench) -> None:
    """Without the sticky bit anybody could put a directory in a job's place."""
    nodes = bench.nodes(1)
    nodes[0].root.mkdir()
    nodes[0].root.chmod(0o777)
    assert "all users may write" in nodes[0].probe()["problems"][0][2]
    job = bench.job(nodes, "true")
    with pytest.raises(PreflightError, match="all users may write"):
        job.place()
    nodes[0].root.chmod(0o755)
    job.start()
    assert job.ended()["state"] == "succeeded"


@pytest.mark.parametrize(
    "name, code", [(".clustertool/log/workerlog.0", 126), (".clustertool/log", 126), ("log/workerlog.0", 0), ("log", 0)]
)
def test_log_is_never_written_through_a_link(bench: Bench, name: str, code: int) -> None:
    """Whoever may write into the job's directory puts a link where a log should be: the rank does not start. In the place of a
    copy for readers the link stays."""
    job = bench.job(None, "echo hello").place()
    trap = bench.tmp / "trap"
    trap.mkdir()
    path = job.dir() / name
    if path.is_dir():
        shutil.rmtree(path)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(trap if path.name == "log" else trap / "file")
    job.start()
    assert job.ended()["code"] == code
    assert code == 0 or "cannot open log/workerlog.0" in job.ended()["reason"]
    assert not list(trap.iterdir())


def test_files_of_ours_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    top = tmp_path / "root" / "JOBx"
    top.parent.mkdir()
    job = files.make_job_dir(str(top))
    (top / "link").symlink_to(secret)
    (top / "folder").symlink_to(tmp_path)
    os.mkfifo(top / "fifo")
    for refused in (
        lambda: files.open_read(job, "link"),
        lambda: files.open_read(job, "folder/secret"),
        lambda: files.open_read(job, "fifo"),
        lambda: files.open_append(job, "link"),
        lambda: files.open_append(job, "folder/new"),
        lambda: files.create(job, "link"),
        lambda: files.create(job, "folder/new"),
    ):
        with pytest.raises(OSError):
            refused()
    files.create(job, "link", b"new", exclusive=False)
    assert (top / "link").read_text() == "new" and secret.read_text() == "x" and not (tmp_path / "new").exists()
    files.create(job, "a/b/c", b"deep")
    assert stat.S_IMODE((top / "a/b").stat().st_mode) == 0o700 and (top / "a/b/c").read_text() == "deep"
    os.close(job)


def test_removal(tmp_path: Path) -> None:
    """Only what carries our marker, whatever is in it, and nothing behind a link."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("x")
    root = tmp_path / "root"
    root.mkdir()
    top = root / "JOBx"
    os.close(files.make_job_dir(str(top)))
    (top / "link").symlink_to(outside)
    (top / "deep").mkdir()
    (top / "deep/link").symlink_to(outside / "file")
    (top / "deep/closed").mkdir(mode=0)
    os.mkfifo(top / "fifo")
    (top / "file").write_bytes(bytes(5000))
    (root / "alias").symlink_to(top)
    with pytest.raises(NotFound):
        files.remove_tree(str(root / "alias"))
    assert files.remove_tree(str(top)) >= 5000
    assert not top.exists() and (outside / "file").read_text() == "x"
    for unmarked in (outside, root, tmp_path / "nowhere"):
        with pytest.raises(NotFound):
            files.remove_tree(str(unmarked))
    assert (outside / "file").exists()


def test_removal_of_what_is_still_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends at this moment writes once more, or another node removes the same directory."""
    top = tmp_path / "JOBx"
    os.close(files.make_job_dir(str(top)))
    (top / "log").mkdir()
    (top / "log/0").touch()
    turns = iter(range(100))
    monkeypatch.setattr(files, "step", lambda: (top / "log/late").touch() if next(turns) == 1 else None)
    files.remove_tree(str(top))
    assert not top.exists() and next(turns) > 3
    assert ledger.remove_job(str(top)) == 0, "the other node was faster"


def test_removal_of_a_very_deep_tree(tmp_path: Path) -> None:
    """Deeper than descriptors or recursion allow: refused with a reason, or done; never half a crash."""
    top = tmp_path / "JOBx"
    os.close(files.make_job_dir(str(top)))
    dig = "i=0; while [ $i -lt 300 ]; do mkdir d && cd d || exit 1; i=$((i+1)); done"
    subprocess.run(["sh", "-c", dig], cwd=top, check=True)
    files.remove_tree(str(top))
    assert not top.exists()


# -- the journal ------------------------------------------------------------------------------------------------------


def lines(path: Path) -> list[object]:
    """What a reader gets: whole lines that are JSON."""
    found = []
    for line in path.read_bytes().split(b"\n"):
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


@pytest.fixture
def limited() -> Iterator[Callable[[int], None]]:
    """A disk that is full from some size on; the signal for it is ignored, as every Python does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_journal_on_a_full_disk(tmp_path: Path, limited: Callable[[int], None]) -> None:
    """The writer goes on; what it has written meanwhile is there when there is room again, each line once and in order."""
    path = tmp_path / "journal"
    journal = files.Journal(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    limited(1000)
    for number in range(200):
        journal.write({"n": number, "text": "x" * (number % 30)})
    assert path.stat().st_size == 1000
    whole = lines(path)
    assert whole == [{"n": n, "text": "x" * (n % 30)} for n in range(len(whole))] and len(whole) > 10
    for size in (1001, 1005, 3000, 3001, 100_000):
        limited(size)
        journal.flush()
    journal.close()
    assert lines(path) == [{"n": n, "text": "x" * (n % 30)} for n in range(200)]


def test_journal_after_a_torn_writer(tmp_path: Path) -> None:
    """The guard writes where a supervisor may have died in the middle of a line."""
    path = tmp_path / "journal"
    path.write_bytes(b'{"n": 1}\n{"n": 2, "te')
    journal = files.Journal(os.open(path, os.O_WRONLY | os.O_APPEND))
    journal.write({"n": 3})
    journal.close()
    assert lines(path) == [{"n": 1}, {"n": 3}]


def test_journal_is_bounded(tmp_path: Path, limited: Callable[[int], None]) -> None:
    journal = files.Journal(os.open(tmp_path / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    limited(0)
    for number in range(30_000):
        journal.write(number)
    limited(1 << 20)
    journal.close()
    assert len(lines(tmp_path / "journal")) == 10_000


def test_a_journal_keeps_room_ahead_and_gives_it_back(small_disk: Path) -> None:
    path = small_disk / "journal"
    journal = ReservingJournal(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), ahead=64 << 10)
    journal.write({"n": 0})
    assert path.stat().st_blocks * 512 >= 64 << 10, "the file system can do it"
    for number in range(1, 2000):  # it grows: what is ahead moves with its end
        journal.write({"n": number})
    fill(small_disk)
    for number in range(2000, 4000):
        journal.write({"n": number})
    assert lines(path) == [{"n": number} for number in range(4000)]
    journal.close()
    assert lines(path) == [{"n": number} for number in range(4000)]
    assert path.stat().st_blocks * 512 < path.stat().st_size + 4096
    free = os.statvfs(small_disk)
    assert free.f_bfree > 0


def test_a_journal_where_no_room_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS before 4.2, and a disk that was full from the start: it is a journal as any other."""
    monkeypatch.setattr(reserving_journal, "reserve", lambda *_: False)
    journal = ReservingJournal(os.open(tmp_path / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND), ahead=64 << 10)
    journal.write({"n": 1})
    journal.close()
    assert lines(tmp_path / "journal") == [{"n": 1}]
    assert (tmp_path / "journal").stat().st_blocks * 512 <= 4096


# -- full disks -------------------------------------------------------------------------------------------------------


def fill(folder: Path) -> None:
    fd = os.open(folder / "ballast", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError):
        while True:
            os.write(fd, bytes(4096))
    os.close(fd)


def test_disk_fills_while_a_job_runs(small_disk: Path, bench: Bench) -> None:
    """The job goes on and ends as it should; room for what must be recorded was kept, so no event is missing at any time."""
    nodes = bench.nodes(1, root=small_disk)
    job = bench.run(nodes, f"echo ready; until [ -e {bench.tmp}/go ]; do sleep 0.05; done; exit 3").ready()
    rank, supervisor = job.rank(), job.process("supervisor")
    stream = job.follow()
    fill(small_disk)
    size = os.stat(job.dir() / ".clustertool/events.jsonl").st_size
    for number in range(
        1, 41
    ):  # more than fits into the last block of the events file: it goes into the room that was kept
        os.kill(rank.pid, signal.SIGSTOP)
        job.until("frozen", count=number)
        os.kill(rank.pid, signal.SIGCONT)
        job.until("thawed", count=number)
    assert os.stat(job.dir() / ".clustertool/events.jsonl").st_size > 4096 + size
    assert alive(supervisor) and alive(rank)
    assert [event["full"] for event in job.until("disk")] == [True]
    (small_disk / "ballast").unlink()
    (bench.tmp / "go").touch()
    ended = job.ended()
    assert (ended["code"], "disk" in ended["reason"]) == (3, False), "it had room again when it failed"
    times = [event["t"] for event in job.events()]
    assert len(times) > 40 and times == sorted(times), "every event, once and in order"
    until(lambda: stream.ended)
    assert stream.events == job.events()


FILL = """
import os
fd = os.open("ballast", os.O_WRONLY | os.O_CREAT)
try:
    while True:
        os.write(fd, bytes(4096))
except OSError:
    pass
"""


def test_disk_is_full_when_a_rank_starts(small_disk: Path, bench: Bench) -> None:
    """The pserver filled it: what fails of it is reported with the reason, and recorded, and the job ends everywhere."""
    nodes = bench.nodes(1, root=small_disk)
    job = bench.run(nodes, ["no-such-program"], pserver=p.python(FILL + p.PSERVER[-1]))
    until(lambda: not alive(job.process("supervisor")))
    summary = job.nodes[0].ask("jobs")["jobs"][0]
    (job.dir() / "ballast").unlink()
    assert summary["state"] == "failed"
    reported = (
        "No space left on device",
        f"the disk of {small_disk} is full",
        "cannot start 'no-such-program'",
    )  # who was first
    assert any(text in summary["reason"] for text in reported), summary


def test_no_room_for_a_job(small_disk: Path, bench: Bench) -> None:
    nodes = bench.nodes(1, root=small_disk / "root")
    (small_disk / "ballast").write_bytes(bytes((1 << 20) - 12 * 4096))
    job = bench.job(nodes, "true", env={"BIG": "x" * 100_000})
    with pytest.raises(PreflightError, match="cannot be filled: No space left on device"):
        job.place()
    assert not job.dir().exists()


def test_release(bench: Bench) -> None:
    """A release that is not here is an error and no empty workspace; what a job writes never changes the release."""
    nodes = bench.nodes(1)
    job = bench.job(nodes, "cat data/file; echo changed > data/file; echo x > data/new")
    job.place_requests[0]["release"] = "0" * 32
    with pytest.raises(ClustertoolError):
        job.place()
    assert not job.dir().exists()
    store = Store(str(nodes[0].root))
    text, name = b"original\n", name_of(b"original\n")
    store.add(name, text)
    release, made = "1" * 32, 10**18
    found = [
        ["d", "data", 0o750, made],
        ["l", "data/link", "file"],
        ["p", name, 9, ""],
        ["s", "data/file", 0o640, made, 0, 9],
    ]
    store.complete(release, text_of(found))
    job.place_requests[0]["release"] = release
    job.start()
    until(lambda: job.events(0, "ended"))
    assert job.log() == b"original\n"
    assert store.read(name) == text
    copy = job.dir() / "data"
    assert (copy / "file").read_text() == "changed\n" and os.readlink(copy / "link") == "file"
    assert stat.S_IMODE((copy / "file").stat().st_mode) == 0o640
    assert stat.S_IMODE(copy.stat().st_mode) == 0o750


def test_many_neighbours_in_a_sticky_root(open_tmp: Path) -> None:
    """root's sticky directory is for everybody: each has a folder of his own there, root the directory itself."""
    open_tmp.chmod(0o1777)
    if os.getuid() == 0:
        assert files.resolve(str(open_tmp)) == str(open_tmp)
        by_other_user(lambda: _own_root(open_tmp))
        assert (open_tmp / str(OTHER_UID)).stat().st_uid == OTHER_UID
    else:
        assert files.resolve(str(open_tmp)) == str(open_tmp)  # it is this user's own


def _own_root(top: Path) -> None:
    root = files.resolve(str(top))
    assert root == str(top / str(OTHER_UID))
    files.make_root(root)
    assert (Path(root) / OURS / "marker").exists()


def test_ranks_are_not_ours_to_trust(bench: Bench) -> None:
    """A rank that removes its whole directory, ours included, is still supervised and still ended."""
    program = f"""
        trap '' TERM; echo pid $$; echo ready; cd /
        until [ -e {bench.tmp}/go ]; do sleep 0.05; done; until rm -rf {bench.tmp}/root*/JOB*; do :; done; exec sleep 1000
    """
    job = bench.run(None, program, policy={"grace": 0.2}).ready()
    rank, supervisor, guard = job.rank(), job.process("supervisor"), job.process("guard")
    (bench.tmp / "go").touch()
    until(lambda: not job.dir().exists())
    assert alive(rank) and alive(supervisor)
    os.kill(supervisor.pid, signal.SIGTERM)
    until(lambda: not alive(rank) and not alive(supervisor) and not alive(guard))


def test_a_file_system_without_sockets_is_named(bench: Bench, tmp_path: Path) -> None:
    """Such as vfat, or some FUSE file systems. Here a library refuses the call as their kernel code does."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("needs a C compiler (package gcc)")
    source, library = tmp_path / "bind.c", tmp_path / "bind.so"
    source.write_text(NO_SOCKETS)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    nodes = bench.nodes(1, env={"LD_PRELOAD": str(library)})
    with pytest.raises(PreflightError) as caught:
        bench.run(nodes, "echo ready")
    assert caught.value.what == f"cannot create a unix socket below {nodes[0].root}: Operation not permitted"
    assert "set ROOT_DIR" in caught.value.fix


NO_SOCKETS = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>

int bind(int fd, const struct sockaddr *address, socklen_t length) {
    if (address->sa_family == AF_UNIX && ((const struct sockaddr_un *)address)->sun_path[0]) {
        errno = EPERM;
        return -1;
    }
    int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "bind");
    return real(fd, address, length);
}
"""
