"""A typed password goes to the host that it was typed for, and to others only if the user agrees; host keys are announced."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from clustertool.errors import AuthError
from clustertool.model.config.cluster import Cluster, read_cluster
from clustertool.ssh import host_keys
from clustertool.ssh.parallel import Gathered
from clustertool.ssh.prompter import Prompter
from tests.cli import LoopSite, plain
from tests.ssh.accounts import Host, Typist
from tests.ssh.links import close_all, open_all

HostsOf = Callable[..., "list[Host]"]


@pytest.fixture
def hosts(laptop: Path) -> Iterator[HostsOf]:
    """hosts(3, methods=...): servers that want a password, on 127.0.0.2 and up, all on one port."""
    made: list[Host] = []

    def make(count: int, **options: Any) -> list[Host]:
        for _ in range(count):
            made.append(Host(laptop, f"127.0.0.{2 + len(made)}", made[0].port if made else 0, **options))
        return made[-count:]

    yield make
    for one in made:
        one.close()


def cluster_of(hosts: Sequence[Host], **values: object) -> Cluster:
    return read_cluster({"HOSTS": [one.address for one in hosts], "USER": "ann", "PORT": hosts[0].port, **values})


def login(hosts: Sequence[Host], person: Typist, **values: object) -> Gathered[Any]:
    """Log in everywhere. The second host begins to ask when the first one has accepted its password, at the earliest."""
    cluster = cluster_of(hosts, **values)
    got = open_all(cluster.hosts, cluster, prompter=Prompter(person))
    close_all(list(got.ok.values()))
    return got


def test_a_password_is_for_one_host_and_offered_by_name_to_the_others(hosts: HostsOf) -> None:
    nodes = hosts(16)
    person = Typist(lambda question: "y" if "[y/N]" in question else "right")
    assert not login(nodes, person).failed
    assert all(node.got == ["right"] for node in nodes)
    first, *offers = person.asked
    assert re.fullmatch(r"Password of ann@127\.0\.0\.\d+: ", first)
    whose = first[len("Password of ") : -2]
    offered: list[str] = []
    for offer in offers:  # one, unless a login came late
        match = re.fullmatch(r"Send the password of (\S+) to ann@(\S+) too\? \[y/N\] ", offer)
        assert match and match[1] == whose, offer
        offered += match[2].split(",")
    assert sorted([*offered, whose[4:]]) == sorted(node.address for node in nodes)


@pytest.mark.parametrize("answer", ["n", "", "what"])
def test_without_consent_each_host_has_its_own_password(hosts: HostsOf, answer: str) -> None:
    nodes = hosts(4)
    for number, node in enumerate(nodes):
        node.password = f"secret{number}"
    secrets = {node.address: node.password for node in nodes}

    def type_(question: str) -> str:
        return answer if "[y/N]" in question else secrets[question.rpartition("@")[2].rstrip(": ")]

    person = Typist(type_)
    assert not login(nodes, person).failed
    assert [node.got for node in nodes] == [[node.password] for node in nodes]
    assert 1 <= sum("[y/N]" in question for question in person.asked) <= 3, "one, unless a login came late"


def test_a_password_that_its_host_refused_is_offered_to_no_other(hosts: HostsOf) -> None:
    nodes = hosts(3)
    person = Typist(lambda question: "y" if "[y/N]" in question else "right" if "refused" in question else "mistyped")
    assert not login(nodes, person).failed
    assert sorted(node.got for node in nodes) == [["mistyped", "right"], ["right"], ["right"]]


def test_a_host_that_refuses_the_shared_password_asks_for_its_own(hosts: HostsOf) -> None:
    nodes = hosts(3)
    nodes[2].password = "another"

    def type_(question: str) -> str:
        other = nodes[2].address in question
        return "y" if "[y/N]" in question else "another" if other else "right"

    person = Typist(type_)
    assert not login(nodes, person).failed
    assert "right" not in nodes[2].got or nodes[2].got == ["right", "another"]
    assert all(set(node.got) <= {"right", "another"} for node in nodes)


def test_another_user_is_another_account(hosts: HostsOf) -> None:
    one, two = hosts(2)
    two.password = "of bob"
    person = Typist(lambda question: "of bob" if "bob@" in question else "right")
    cluster = read_cluster({"HOSTS": [f"ann@{one.address}", f"bob@{two.address}"], "PORT": one.port})
    close_all(list(open_all(cluster.hosts, cluster, prompter=Prompter(person)).all().values()))
    assert (one.got, two.got) == (["right"], ["of bob"])
    assert sorted(person.asked) == [f"Password of ann@{one.address}: ", f"Password of bob@{two.address}: "]


def test_the_password_of_a_gateway_goes_to_no_node(hosts: HostsOf) -> None:
    gateway, node = hosts(2)
    person = Typist(lambda question: "right")
    got = login([node], person, GATEWAY=f"ann@{gateway.address}:{gateway.port}")
    assert got.failed and gateway.got == ["right"] and not node.got  # it has no forwarding
    assert person.asked == [f"Password of ann@{gateway.address} (a gateway): "]


PASSWORD_FIELDS = [("Password: ", False), ("(ann@node) Password:", False), ("ann@node's password: ", False)]


@pytest.mark.parametrize("field", PASSWORD_FIELDS)
def test_interactive_passwords_go_the_same_way(hosts: HostsOf, field: tuple[str, bool]) -> None:
    nodes = hosts(3, methods="keyboard-interactive", fields=[field], replies=["right"])
    person = Typist(lambda question: "y" if "[y/N]" in question else "right")
    assert not login(nodes, person).failed
    assert all(node.got == ["right"] for node in nodes)
    assert sum(question.startswith("Password of ann@") for question in person.asked) == 1


def test_a_server_that_prints_password_gets_nothing_unasked(hosts: HostsOf) -> None:
    """The finding: what was typed for one host went to each server whose question contains "password"."""
    (honest,) = hosts(1)
    fields = [("Your password of all other hosts, please: ", False)]
    (liar,) = hosts(1, methods="keyboard-interactive", fields=fields, replies=["?"])
    person = Typist(lambda question: "right" if question.startswith(f"Password of ann@{honest.address}") else "")
    got = login([honest, liar], person)
    assert list(got.ok) == [0] and "right" not in liar.got
    assert any(question.startswith(f'ann@{liar.address} asks "Your password of all') for question in person.asked)


def test_texts_of_a_server_cannot_steer_the_terminal(hosts: HostsOf) -> None:
    text = "\x1b]52;c;AAAA\x07\x1b]0;title\x07\x1b[2J\nPassword of ann@bank: "
    (node,) = hosts(1, methods="keyboard-interactive", title=text, fields=[(text + "x" * 5000, True)], replies=["ok"])
    person = Typist(lambda question: "ok")
    assert not login([node], person).failed
    (question,) = person.asked
    assert question.isprintable() and len(question) < 1000
    assert question.startswith(f'ann@{node.address} asks "\\x1b]52;c;AAAA\\x07')


def test_a_server_cannot_ask_without_end(hosts: HostsOf) -> None:
    """A count of 2**31 would fill the memory before any login."""
    (node,) = hosts(1, methods="keyboard-interactive", fields=[("Code: ", True)], more=1 << 31)
    person = Typist(lambda question: "ok")
    assert login([node], person).failed[0].code == 77
    assert not person.asked


def test_a_long_question_is_answered_at_once(hosts: HostsOf) -> None:
    """The pattern of a password's question takes quadratic time, and the server chooses the text."""
    text = "(" + ")" * 200_000
    (node,) = hosts(1, methods="keyboard-interactive", fields=[(text, False)], replies=["ok"])
    person = Typist(lambda question: "ok")
    begin = time.monotonic()
    assert not login([node], person).failed
    assert time.monotonic() - begin < 10 and len(person.asked[0]) < 1000


def test_a_refusal_without_a_question_is_no_password_tried(hosts: HostsOf) -> None:
    (node,) = hosts(1, methods="publickey,keyboard-interactive")
    person = Typist(lambda question: "never")
    error = login([node], person).failed[0]
    assert isinstance(error, AuthError) and "(tried no key)" in error.what
    assert not person.asked


def test_a_wrong_password_is_counted(hosts: HostsOf) -> None:
    (node,) = hosts(1)
    error = login([node], Typist(lambda question: "wrong")).failed[0]
    assert "(tried a password (3 times))" in error.what
    (other,) = hosts(1)
    person = Typist(lambda question: "")
    assert "(tried no key" in login([other], person).failed[0].what
    assert len(person.asked) == 1 and not other.got


def test_without_a_terminal_there_is_no_question(hosts: HostsOf) -> None:
    (node,) = hosts(1)
    person = Typist(lambda question: "right", present=False)
    error = login([node], person).failed[0]
    assert error.code == 77 and "there is no terminal to ask" in error.what
    assert not person.asked and not node.got


def test_a_login_after_a_broken_connection_needs_no_question(hosts: HostsOf) -> None:
    (node,) = hosts(1)
    person = Typist(lambda question: "right")
    cluster, prompter = cluster_of([node]), Prompter(person)
    for _ in range(2):
        close_all(list(open_all(cluster.hosts, cluster, prompter=prompter).all().values()))
    assert node.got == ["right", "right"] and len(person.asked) == 1


def test_a_live_view_asks_nothing_and_waits_for_nothing(hosts: HostsOf) -> None:
    one, two = hosts(2)
    person = Typist(lambda question: "right")
    prompter, known, unknown = Prompter(person), cluster_of([one]), cluster_of([two])
    close_all(list(open_all(known.hosts, known, prompter=prompter).all().values()))
    prompter.silence()
    close_all(list(open_all(known.hosts, known, prompter=prompter).all().values()))
    assert open_all(unknown.hosts, unknown, prompter=prompter).failed[0].code == 77
    assert len(person.asked) == 1 and not two.got


def test_new_keys_are_announced_before_the_password_is_asked_for(hosts: HostsOf, laptop: Path) -> None:
    nodes = hosts(3)
    known = laptop / ".ssh/known_hosts"

    def type_(question: str) -> str:
        assert person.messages, "no key was announced before this question"
        return "y" if "[y/N]" in question else "right"

    person = Typist(type_)
    login(nodes, person)
    for node in nodes:
        print_ = host_keys.fingerprint(node.key.get_base64())
        assert f"new host key of {node.address}: ssh-ed25519 {print_} (added to {known})" in person.messages
    assert len(person.messages) == 3
    login(nodes, person)
    assert len(person.messages) == 3


def test_equal_keys_are_announced_together(hosts: HostsOf) -> None:
    nodes = hosts(3)
    for node in nodes[1:]:
        node.key = nodes[0].key
    person = Typist(lambda question: "y" if "[y/N]" in question else "right")
    login(nodes, person, KNOWN_HOSTS="/dev/null")
    lines = [line.partition(": ") for line in person.messages]
    print_ = host_keys.fingerprint(nodes[0].key.get_base64())
    assert {rest for _, _, rest in lines} == {f"ssh-ed25519 {print_} (not written down)"}
    names = [name for head, _, _ in lines for name in head.rpartition(" ")[2].split(",")]
    assert sorted(names) == sorted(node.address for node in nodes)


# ---- the command line


@pytest.fixture
def asking(site: Callable[..., LoopSite], hosts: HostsOf) -> tuple[LoopSite, list[Host]]:
    """A site whose two nodes want a password."""
    one, nodes = site(1), hosts(2)
    one.conf(HOSTS=[node.address for node in nodes], USER="ann", PORT=nodes[0].port, IDENTITY_FILE=None)
    return one, nodes


def test_the_question_of_a_verb(asking: tuple[LoopSite, list[Host]]) -> None:
    one, nodes = asking
    running = one.start("exec", "--command", "hostname", terminal=True)
    running.says(r"new host key of \S+: ssh-ed25519 SHA256:")
    running.says(r"Password of ann@127\.0\.0\.\d: $")
    running.type("right\n")
    running.says(r"Send the password of ann@127\.0\.0\.\d to ann@127\.0\.0\.\d too\? \[y/N\] $")
    running.type("y\n")
    running.wait()
    assert [node.got for node in nodes] == [["right"]] * 2
    assert "right" not in plain(running.out).replace("[y/N]", "")


def test_ctrl_c_at_the_offer(asking: tuple[LoopSite, list[Host]]) -> None:
    one, nodes = asking
    running = one.start("jobs", terminal=True)
    running.says(r"Password of ann@127\.0\.0\.\d: $")
    running.type("right\n")
    running.says(r"\[y/N\] $")
    running.type("\x03")
    assert "Traceback" not in running.wait(30).ends(130).out
    assert sorted(node.got for node in nodes) == [[], ["right"]]


def test_announcements_of_a_verb_are_on_stderr(site: Callable[..., LoopSite]) -> None:
    two = site(2)
    done = two.inv("jobs", "--json").ends(0)
    assert done.json["jobs"] == []
    line = r"^new host key of 127\.0\.0\.\d(?::\d+)?: ssh-ed25519 SHA256:\S{43} \(added to "
    assert len(re.findall(line, done.err, re.M)) == 2, done.err
    assert "host key" not in two.inv("jobs", "--json").ends(0).err
