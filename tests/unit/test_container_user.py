"""The user of a rank in an image: entries of /etc/passwd and /etc/group, and HOME."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clustertool.model.container.container_command import HOME_SCRIPT, RankUser, group, passwd
from clustertool.node.container.rank_user import home_inside, rank_user

ANN = RankUser("ann", 4001, 4002, "/root/.clustertool/home")
OTHERS = "root:x:0:0:root:/root:/bin/bash\nmail:x:8:8:mail:/var/mail:/usr/sbin/nologin\n"


def test_an_entry_is_added_where_the_image_has_none() -> None:
    entry = "ann:x:4001:4002::/root/.clustertool/home:/bin/sh\n"
    assert passwd(OTHERS, ANN) == OTHERS + entry
    assert passwd(OTHERS.rstrip("\n"), ANN) == OTHERS + entry, "a last line without its end"
    assert passwd("", ANN) == entry
    assert group("root:x:0:\n", ANN) == "root:x:0:\nann:x:4002:\n"


def test_an_entry_of_the_image_stays() -> None:
    own = OTHERS + "app:x:4001:50:an app:/home/app:/bin/sh\n"
    assert passwd(own, ANN) == own
    assert passwd(own, RankUser("x", 400, 1, "/h")) != own, "a number is compared as a whole"
    assert group("app:x:4002:a,b\n", ANN) == "app:x:4002:a,b\n"


def test_no_name_adds_a_field_or_a_line() -> None:
    made = passwd("", RankUser("a:0:0\nroot2:x", 5, 5, "/h:x"))
    assert made == "a_0_0_root2_x:x:5:5::/h_x:/bin/sh\n"


@pytest.mark.parametrize(
    ("home", "kept"), [("there", True), ("missing", False), ("file", False), ("", False), ("/", False)]
)
def test_home_is_that_of_the_image_if_it_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, kept: bool
) -> None:
    """The shell of a container and Python in a pod decide in the same way."""
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    own = str(tmp_path / home) if home.isalpha() else home
    user = rank_user(str(tmp_path))
    assert user.home == str(tmp_path / ".clustertool/home") and Path(user.home).stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("HOME", own)
    env = {"HOME": own, "CLUSTERTOOL_HOME": user.home}
    done = subprocess.run(
        ["sh", "-c", HOME_SCRIPT + 'echo "$HOME"'], env=env, text=True, stdout=subprocess.PIPE, check=True
    )
    assert done.stdout.strip() == home_inside(user) == (own if kept else user.home)
