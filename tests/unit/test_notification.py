"""Notifications: their texts, what sends them, and whether the coordinator or an attached laptop does."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertool.actions.load_config import mask_known_secrets
from clustertool.errors import ConfigError
from clustertool.fleet import notify
from clustertool.model.config.cluster import read_cluster
from clustertool.model.masking import mask
from clustertool.model.notification import Notification, describe, needs_laptop, secret_parts
from clustertool.node.jobs.descendants import APART, Descendants
from clustertool.node.supervisor import notification_sender, notifier
from clustertool.node.supervisor.notification_sender import deliver, send_once
from clustertool.node.supervisor.notifier import Notifier
from clustertool.node.system import processes
from clustertool.show.job_text import news_text
from clustertool.watch.job_view import JobView
from tests.notified import Receiver, command, until, written

MESSAGE = Notification(id="7a", event="end", job="20261127-1", name="", text="job 1: succeeded", code=0)
DONE: dict[str, Any] = {"state": "succeeded", "code": 0, "reason": "all trainers are done"}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    yield server
    server.end()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notification_sender, "_PAUSES", (0.01, 0.01, 0.0))


# -- texts --------------------------------------------------------------------------------------------------------------


def verdict(state: str, code: int, reason: str) -> dict[str, Any]:
    return {"state": state, "code": code, "reason": reason}


@pytest.mark.parametrize(
    "kind, event, about",
    [
        ("verdict", DONE, ("end", "succeeded with exit code 0: all trainers are done")),
        ("verdict", verdict("stopped", 130, "Ctrl+C"), ("end", "stopped with exit code 130: Ctrl+C")),
        ("verdict", verdict("failed", 3, "why"), ("failure", "failed with exit code 3: why")),
        ("verdict", verdict("timeout", 124, "why"), ("failure", "timeout with exit code 124: why")),
        ("verdict", verdict("lost", 75, "why"), ("failure", "lost with exit code 75: why")),
        ("lost", {"node": 1, "why": "no heartbeat for 10 s"}, ("loss", "node b is lost: no heartbeat for 10 s")),
        ("restart", {"attempt": 2}, ("restart", "attempt 2 begins: trainer 1 failed")),
        ("started", {"role": "trainer"}, ("", "")),
        ("ended", DONE, ("", "")),
        ("notification", {"event": "end"}, ("", "")),
    ],
)
def test_events_of_the_coordinator_make_messages(kind: str, event: dict[str, Any], about: object) -> None:
    assert describe(kind, event, "trainer 1 failed", ["a", "b"]) == about


def test_a_restart_without_a_known_failure() -> None:
    assert describe("restart", {"attempt": 1}, "", []) == ("restart", "attempt 1 begins")


def test_what_is_masked() -> None:
    assert secret_parts(("https://a.org/b",)) == ["https://a.org/b"]
    hide = mask(secret_parts(("/opt/bin/notify", "-q", "--token=abc")))
    assert hide("run /opt/bin/notify -q --token=abc") == "run *** -q ***"
    assert secret_parts(()) == []


# -- one message --------------------------------------------------------------------------------------------------------


def test_a_post(receiver: Receiver) -> None:
    assert send_once([receiver.address], MESSAGE) == ""
    assert receiver.messages == [MESSAGE]
    assert receiver.headers["Content-Type"] == "application/json"
    assert receiver.headers["User-Agent"] == "clustertool"


@pytest.mark.parametrize("status", [400, 404, 429, 500, 307, 308])
def test_a_server_that_refuses(receiver: Receiver, status: int) -> None:
    receiver.status = status
    assert send_once([receiver.address], MESSAGE) == f"the POST has failed ({status})"
    assert receiver.methods == ["POST"]


def test_a_redirect_that_would_lose_the_message_is_an_error(receiver: Receiver) -> None:
    receiver.status = 302
    assert send_once([receiver.address], MESSAGE) == "the server redirects"


def test_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert send_once([f"http://127.0.0.1:{port}/x"], MESSAGE) == "the POST has failed (ConnectionRefusedError)"
        unused.listen()
        monkeypatch.setattr(notification_sender, "_TIMEOUT", 0.1)
        assert send_once([f"http://127.0.0.1:{port}/x"], MESSAGE) == "the POST has failed (TimeoutError)"


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:correct-horse/x", "http://[correct-horse/x", "https://correct-horse.invalid/"]
)
def test_an_address_that_leads_nowhere_is_not_shown(address: str) -> None:
    why = send_once([address], MESSAGE)
    assert why.startswith("the POST has failed (") and "horse" not in why


def test_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLUSTERTOOL_SECRET", "s3cr3t")
    body = "assert 'CLUSTERTOOL_SECRET' not in os.environ and os.getcwd() == '/'; print('x' * 100_000)"
    assert send_once(command(tmp_path, body), MESSAGE) == ""
    assert written(tmp_path) == [MESSAGE]


def test_a_command_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert send_once(command(tmp_path, "sys.exit(3)"), MESSAGE) == "the command ended with 3"
    assert send_once(["/nowhere/correct-horse"], MESSAGE) == "the command cannot be started"
    monkeypatch.setattr(notification_sender, "_COMMAND_LIMIT", 0.5)
    began = time.monotonic()
    assert send_once(["sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid; wait"], MESSAGE).endswith(
        "did not end in 0.5 s"
    )
    assert time.monotonic() - began < 10
    pid = int((tmp_path / "pid").read_text())
    until(
        lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text(), "its child is dead"
    )


def test_three_tries(tmp_path: Path) -> None:

    count = tmp_path / "tries"
    body = f"open({str(count)!r}, 'a').write('x')\nif len(open({str(count)!r}).read()) < 3: sys.exit(1)"
    assert deliver(command(tmp_path, body), MESSAGE) == ""
    assert (count.read_text(), written(tmp_path)) == ("xxx", [MESSAGE])

    count.unlink()
    assert deliver(command(tmp_path, f"open({str(count)!r}, 'a').write('x'); sys.exit(1)"), MESSAGE) == (
        "the command ended with 1; tried three times"
    )
    assert count.read_text() == "xxx"


# -- the coordinator ----------------------------------------------------------------------------------------------------


class Coordinator:
    """A notifier with the records of a job on disk."""

    def __init__(self, folder: Path, notify: list[str]) -> None:
        self.job = folder / "JOBx1"
        (self.job / ".clustertool").mkdir(parents=True, exist_ok=True)
        (self.job / ".clustertool/events.jsonl").touch()
        (self.job / ".clustertool/marker").touch()
        spec: Any = {
            "job": "x1",
            "job_dir": str(self.job),
            "header": {"job_name": "run-a"},
            "shape": {"names": ["a", "b"]},
            "notify": notify,
        }
        self.recorded: list[dict[str, Any]] = []
        self.notifier = Notifier(spec, lambda kind, **fields: self.recorded.append({"type": kind, **fields}))

    @property
    def appended(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.job / ".clustertool/events.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def _reap() -> Iterator[None]:
    yield
    notifier.end_senders()
    assert not APART


def test_without_notify_nothing_is_recorded(tmp_path: Path) -> None:
    one = Coordinator(tmp_path, [])
    one.notifier.note("verdict", DONE)
    assert (one.recorded, APART) == ([], set())


def test_the_coordinator_sends_where_no_laptop_does(tmp_path: Path, receiver: Receiver) -> None:
    one = Coordinator(tmp_path, [receiver.address])
    one.notifier.note("phase", {"name": "ending", "why": "trainer 0 on a ended with exit code 9"})
    one.notifier.note("restart", {"attempt": 1})
    one.notifier.note("verdict", DONE)
    assert not one.notifier.offered
    until(lambda: len(receiver.messages) == 2, "both came")
    restart, end = sorted(receiver.messages, key=lambda message: message["event"], reverse=True)
    assert restart["text"] == "job run-a: attempt 1 begins: trainer 0 on a ended with exit code 9"
    assert end == {**end, "event": "end", "job": "x1", "name": "run-a", "code": 0}
    assert [(event["id"], event["laptop"], event["failed"]) for event in one.recorded] == [
        (restart["id"], "", ""),
        (end["id"], "", ""),
    ]
    assert restart["id"] != end["id"] and one.appended == []
    assert receiver.address not in str(one.recorded)


def test_of_nodes_that_are_lost_together_the_first_makes_a_message(tmp_path: Path, receiver: Receiver) -> None:
    one = Coordinator(tmp_path, [receiver.address])
    for kind, event in [
        ("lost", {"node": 1, "why": "silent"}),
        ("lost", {"node": 0, "why": "silent"}),
        ("restart", {"attempt": 1}),
        ("lost", {"node": 0, "why": "silent"}),
    ]:
        one.notifier.note(kind, event)
    texts = ["job run-a: node b is lost: silent", "job run-a: attempt 1 begins", "job run-a: node a is lost: silent"]
    assert [event["text"] for event in one.recorded] == texts


def test_a_failure_is_one_event_and_the_process_leaves_the_address_nowhere(tmp_path: Path, receiver: Receiver) -> None:
    receiver.status = 503
    one = Coordinator(tmp_path, [receiver.address])
    one.notifier.note("verdict", DONE)
    (pid,) = APART
    until(lambda: b"ct-notify" in Path(f"/proc/{pid}/comm").read_bytes(), "it has its name")
    assert receiver.address.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    until(lambda: one.appended, "the failure is recorded")
    (event,) = one.appended
    assert (event["type"], event["id"]) == ("notification", one.recorded[0]["id"])
    assert event["failed"] == "the POST has failed (503); tried three times" and event["laptop"] == ""
    assert receiver.methods == ["POST"] * 3 and receiver.address not in str(event)


def test_an_attached_laptop_that_confirms_sends_alone(tmp_path: Path, receiver: Receiver) -> None:
    one = Coordinator(tmp_path, [receiver.address])
    one.notifier.attached({"laptop": "one", "notified": ""})
    one.notifier.note("verdict", DONE)
    (event,) = one.recorded
    assert event["laptop"] == "one" and list(one.notifier.offered) == [event["id"]]
    one.notifier.turn()
    one.notifier.attached({"laptop": "one", "notified": "another"})
    assert one.notifier.offered
    one.notifier.attached({"laptop": "one", "notified": event["id"]})
    one.notifier.turn(last=True)
    assert not one.notifier.offered and not APART and receiver.messages == []


@pytest.mark.parametrize("last", [True, False])
def test_the_coordinator_sends_what_a_laptop_does_not_confirm(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    monkeypatch.setattr(notifier, "_CONFIRMED", 60.0 if last else 0.3)
    one = Coordinator(tmp_path, [receiver.address])
    one.notifier.attached({"laptop": "one"})
    one.notifier.note("verdict", DONE)
    one.notifier.turn()
    assert not APART
    until(lambda: one.notifier.turn(last) or not one.notifier.offered, "the time is over")
    until(lambda: receiver.events == ["end"], "it came")
    assert receiver.messages[0]["id"] == one.recorded[0]["id"]


def test_a_laptop_that_is_gone_or_sends_none_is_not_waited_for(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Coordinator(tmp_path, [receiver.address])
    one.notifier.attached({"laptop": "one"})
    one.notifier.attached({"laptop": "", "notified": ""})  # another one, whose conf.py has no NOTIFY
    one.notifier.note("restart", {"attempt": 1})
    assert not one.notifier.offered
    one.notifier.attached({"laptop": "one"})
    monkeypatch.setattr(notifier, "_ATTACHED", 0.0)
    one.notifier.note("verdict", DONE)
    assert not one.notifier.offered
    until(lambda: sorted(receiver.events) == ["end", "restart"], "both came")


def test_nodes_cannot_send_to_other_services(tmp_path: Path) -> None:
    one = Coordinator(tmp_path, ["mailtos://ann:word@example.org"])
    one.notifier.note("verdict", DONE)
    until(lambda: one.appended, "the failure is recorded")
    (sent,), (event,) = one.recorded, one.appended
    assert (sent["failed"], event["id"]) == ("", sent["id"]) and "no attached laptop" in event["failed"]
    assert "ann" not in str(event)


def test_a_removed_job_and_a_fork_that_fails(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fork() -> int:
        raise BlockingIOError(11, os.strerror(11))

    one = Coordinator(tmp_path, [receiver.address])
    monkeypatch.setattr(os, "fork", fork)
    one.notifier.note("verdict", DONE)
    assert one.recorded[-1]["failed"] == f"no process can be started: {os.strerror(11)}"


# -- the laptop ---------------------------------------------------------------------------------------------------------


def test_the_laptop_sends_the_same_message(receiver: Receiver, tmp_path: Path) -> None:
    assert notify.deliver((receiver.address,), MESSAGE) == "" and receiver.messages == [MESSAGE]
    assert notify.deliver(tuple(command(tmp_path)), MESSAGE) == "" and written(tmp_path) == [MESSAGE]
    assert "ended with 1" in notify.deliver(tuple(command(tmp_path, "sys.exit(1)")), MESSAGE)


def test_apprise_sends_to_other_services(receiver: Receiver, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("apprise")
    address = (f"json://127.0.0.1:{receiver.server_port}/correct-horse-battery",)
    assert needs_laptop(address) and notify.can_send(address)
    receiver.messages = []
    assert notify.deliver(address, MESSAGE) == ""
    (got,) = receiver.messages
    assert (got["title"], got["message"]) == ("clustertool: end", MESSAGE["text"])
    receiver.status = 500
    assert notify.deliver(address, MESSAGE) == "apprise could not send it; tried three times"
    assert "horse" not in "".join(capfd.readouterr()), "its log has the address"


def checked(address: str) -> None:
    notify.check(read_cluster({"HOSTS": ["a"], "NOTIFY": address}))


def test_a_service_that_apprise_does_not_know() -> None:
    pytest.importorskip("apprise")
    checked("json://127.0.0.1/x")
    with pytest.raises(ConfigError, match="NOTIFY needs apprise") as caught:
        checked("nosuchservice://s3cr3t")
    assert "s3cr3t" not in caught.value.what + caught.value.fix and caught.value.code == 78


def test_without_the_extra_only_other_services_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify.importlib.util, "find_spec", lambda name: None)
    checked("https://example.org/x")
    checked("")
    with pytest.raises(ConfigError, match="NOTIFY needs apprise") as caught:
        checked("mailtos://ann:s3cr3t@example.org")
    assert "pip install 'clustertool[notify]'" in caught.value.fix
    assert "s3cr3t" not in caught.value.what + caught.value.fix
    assert not notify.can_send(("mailtos://ann:s3cr3t@example.org",))


# -- what users see -----------------------------------------------------------------------------------------------------


def test_only_a_message_that_was_not_sent_is_news() -> None:
    view = JobView(frozenset([0]))
    sent: Any = {"type": "notification", "t": 1.0, **MESSAGE, "laptop": "", "failed": ""}
    failed = {**sent, "failed": "the POST has failed (404); tried three times"}
    frame: Any = {"type": "events", "node": 0, "events": [sent, failed], "at": 9}
    (news,) = view.take(0, frame, b"", 1.0)
    assert news_text(news) == "a notification (end) was not sent: the POST has failed (404); tried three times"  # type: ignore[arg-type]


def test_the_receiver_is_masked_in_what_is_shown() -> None:
    cluster = read_cluster({"HOSTS": ["a"], "NOTIFY": "https://example.org/s3cr3t"})
    assert mask_known_secrets(cluster)("see https://example.org/s3cr3t!") == "see ***!"


# -- its process --------------------------------------------------------------------------------------------------------


def test_a_process_that_sends_and_what_it_starts_are_no_processes_of_the_job(tmp_path: Path) -> None:
    (tmp_path / ".clustertool").mkdir()
    job = os.open(tmp_path, os.O_RDONLY)
    family = Descendants(job, processes.this_process())
    before = {process.pid for process in family.living()}  # of other tests
    with subprocess.Popen(["sleep", "1000"]) as rank, subprocess.Popen(["sh", "-c", "sleep 1000; true"]) as sender:
        try:
            APART.add(sender.pid)
            until(lambda: processes.children(sender.pid), "its child runs")
            found = {process.pid for process in family.living()}
            assert rank.pid in found and found.isdisjoint([sender.pid, *processes.children(sender.pid)])
            rank.kill()
            rank.wait()
            others = {sender.pid}
            assert {process.pid for process in family.living()} <= before and others == APART
            assert before or not family.has_children()
            for process in (*processes.descendants(sender.pid), processes.identify(sender.pid)):
                assert process is not None
                os.kill(process.pid, signal.SIGKILL)
            sender.wait()
            assert {process.pid for process in family.living()} <= before and not APART, (
                "a later process may have its pid"
            )
        finally:
            rank.kill()
            sender.kill()
            APART.clear()
    family.close()
    os.close(job)
