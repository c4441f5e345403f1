"""What a hostile node says of its part in a dispatch: it fails alone, and the other nodes get the workspace."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clustertool.model.dispatch.topology import require_below
from tests.cli import LoopSite
from tests.security.hostile import site_with_hostile

# A relay that is ready, and then says what a test wants.
RELAY = """
    def answer(request):
        if request["type"] == "probe":
            reply(request, hostname="evil", address="127.0.0.3", root="/tmp/evil", root_id="evil", home="/tmp", user="x",
                  disk_free=1 << 40, cpus=1, time=time.time(), examined=False, netns=os.readlink("/proc/self/ns/net"),
                  boot_id=open("/proc/sys/kernel/random/boot_id").read().strip())
        elif request["type"] == "patch":
            reply(request, have=False)
        elif request["type"] == "relay":
            reply(request)
            write(frame(dict(type="relay-ready", port=1, empty=True)))
            write(frame(WORD))
        elif not request["type"].startswith("relay-"):
            reply(request)
"""


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"type": "relay-wrong", "piece": 10**9}, "its relay sent what is not valid: there is no piece 1000000000"),
        ({"type": "relay-lacks", "lacks": "f" * 1000, "have": "0"}, "its relay sent what is not valid: too many"),
        ({"type": "relay-nonsense"}, "it sent something that is not valid: a frame is of no known type"),
    ],
    ids=["piece", "number", "kind"],
)
def test_an_argument_that_is_not_valid_fails_its_node(
    site: Callable[..., LoopSite], message: dict[str, object], says: str
) -> None:
    one = site(2)
    site_with_hostile(one, 1, f"WORD = {message!r}\n" + RELAY.replace("\n    ", "\n"))
    one.workspace(train_py="print('hello')")
    done = one.inv("dispatch", "--workspace", "job")
    assert done.code == 74, done.err
    assert f"{one.name(1)}: {says}" in done.err
    assert one.name(0) not in done.last
    assert list((one.root(0) / ".clustertool" / "releases").iterdir())


def test_numbers_of_pieces() -> None:
    require_below(3, [0, 1, 2])
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=f"no piece {wrong}"):
            require_below(3, [0, wrong])
