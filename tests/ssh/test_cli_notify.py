"""NOTIFY: which process sends a message, what a user sees of it, and that its address is shown nowhere."""

from __future__ import annotations

import json

import pytest

from tests.cli import until
from tests.notified import Receiver, command, written

SECRET = "correct-horse-battery"


@pytest.fixture
def receiver():
    server = Receiver()
    yield server
    server.end()


def events(site, job, node=0):
    lines = (site.job_dir(node, job) / ".clustertool/events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, filter(None, lines)) if event["type"] == "notification"]


def test_an_attached_command_sends_in_place_of_the_coordinator(site, receiver):
    one = site(1).conf(NOTIFY=receiver.address)
    one.workspace(train_py="import sys, time; time.sleep(2); sys.exit(3)")
    done = one.clustertool("run", "-w", "job", "--name", "resnet").ends(3)
    (message,) = receiver.messages
    assert (message["event"], message["job"], message["name"], message["code"]) == ("failure", done.job, "resnet", 3)
    (event,) = events(one, done.job)
    assert event["laptop"] and event["id"] == message["id"] and not event["failed"]
    assert SECRET not in done.out + done.err


def test_the_coordinator_sends_for_a_job_that_runs_alone(site, receiver, tmp_path):
    one = site(1).conf(NOTIFY=receiver.address)
    one.workspace(
        train_py=f"""
        import os, time
        while not os.path.exists({str(tmp_path / "go")!r}):
            time.sleep(0.02)
    """
    )
    job = one.clustertool("run", "-w", "job", "--detach").ends(0).job
    (tmp_path / "go").touch()
    until(lambda: receiver.events == ["end"], 40)
    assert receiver.messages[0]["job"] == job


def test_a_command_gets_the_message_on_the_machine_that_sends(site, tmp_path):
    one = site(1).conf(NOTIFY=command(tmp_path))
    one.workspace(train_py="")
    job = one.clustertool("run", "-w", "job").ends(0).job
    # The coordinator sends it, a moment after the end, if the job has ended before the command was attached.
    until(lambda: [(message["event"], message["job"]) for message in written(tmp_path)] == [("end", job)], 40)


def test_a_message_that_cannot_be_sent_is_a_warning(site, receiver):
    receiver.status = 404
    one = site(1).conf(NOTIFY=receiver.address)
    one.workspace(train_py="import time; time.sleep(2)")  # until the command is known to be attached
    done = one.clustertool("run", "-w", "job").ends(0)
    assert "a notification (end) was not sent: the POST has failed (404); tried three times" in done.err
    until(lambda: [bool(event["failed"]) for event in events(one, done.job)] == [False, True], 40)
    assert SECRET not in done.out + done.err + str(events(one, done.job))


def test_the_address_is_masked(site, receiver):
    one = site(2).conf(NOTIFY=receiver.address)
    one.workspace(
        train_py=f"""
        print("it is {receiver.address} here", flush=True)
        raise ValueError("{receiver.address} is wrong")
    """
    )
    texts = []
    for args in (("--dry",), ("--dry", "--json"), ("-v", "--dry"), ("-v",)):
        done = one.clustertool("run", "-w", "job", *args)
        texts.append(done.out + done.err)
    assert "it is *** here" in texts[-1]
    for args in (("status", "--json"), ("report",), ("logs", "-r", "all"), ("jobs", "--json")):
        done = one.clustertool(*args)
        texts.append(done.out + done.err)
    texts += [page.read_text() for page in one.folder.glob("*.html")]
    assert SECRET not in "".join(texts)
    for node in range(2):
        for path in one.root(node).rglob(".clustertool/*"):
            if path.is_file():
                assert SECRET not in path.read_text(errors="replace"), path
    assert SECRET in one.clustertool("logs", "--raw").ends(0).out, "exact"


def test_an_address_that_needs_the_extra(site):
    one = site(1).conf(NOTIFY=f"nosuchservice://{SECRET}")
    one.workspace(train_py="")
    done = one.clustertool("run", "-w", "job").ends(78)
    assert "NOTIFY needs apprise" in done.err and "pip install" in done.err and SECRET not in done.err
    one.clustertool("jobs").ends(0)


def test_a_conf_py_that_is_sent_with_the_workspace(site, receiver):
    one = site(1).conf(NOTIFY=receiver.address)
    one.workspace(".", train_py="")
    warning = "has NOTIFY, and is sent with the workspace"
    assert warning in one.clustertool("run", "-w", ".", "--dry").ends(0).err
    (one.folder / ".clusterignore").write_text("/conf.py\n")
    assert warning not in one.clustertool("run", "-w", ".", "--dry").ends(0).err
