"""Names that are no UTF-8, of other processes, and files that are UTF-8 whatever the locale is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clustertool.node.ports import listeners

LISTENER = r"""
import socket, sys
open("/proc/self/comm", "wb").write(b"\xff\xfe\x80")
sock = socket.create_server(("127.0.0.1", 0))
print(sock.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_a_process_with_any_name_may_hold_a_port() -> None:
    """Any local user can start one: the probe of the node must not fail."""
    child = subprocess.Popen([sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout and child.stdin
        port = int(child.stdout.readline())
        assert f"(pid {child.pid}, user" in listeners.holders([port])[port]
    finally:
        child.stdin.close()  # type: ignore[union-attr]
        child.wait(30)
        child.stdout.close()  # type: ignore[union-attr]


READ = """
import locale, pathlib, sys
assert locale.getpreferredencoding(False).upper() not in ("UTF-8", "UTF8"), "the test has the wrong locale"
from clustertool.fleet.dispatch.workspace import read_workspace
from clustertool.actions.load_workspace import workspace_toml
top = pathlib.Path(sys.argv[1])
print(ascii(workspace_toml(top)["env"]["GREETING"]), ascii(read_workspace(top).files))
"""


@pytest.mark.parametrize("locale", ["C", "POSIX"])
def test_files_of_a_workspace_are_utf8_in_any_locale(tmp_path: Path, locale: str) -> None:
    (tmp_path / "job.toml").write_text('# Grüße\n[env]\nGREETING = "schön"\n', encoding="utf-8")
    (tmp_path / ".clusterignore").write_text("größe\n", encoding="utf-8")
    (tmp_path / "größe").touch()
    env = {
        "LC_ALL": locale,
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path)], env=env, capture_output=True, text=True, timeout=60
    )
    assert not done.returncode, done.stderr
    assert done.stdout == "'sch\\xf6n' ('.clusterignore', 'job.toml')\n"
