"""A job lives without the laptop that started it, and any other laptop with the same conf.py gets the whole truth."""

from __future__ import annotations

import shutil
import signal

from tests import cases


def test_word2vec_finishes_after_its_laptop_is_killed(site, tmp_path):
    two = cases.with_numpy(site(2))
    running = two.start("run", "-w", cases.small_word2vec(two.folder), "--server-num", 1, "--worker-num", 1)
    job = running.says(r"^job (\S+):")
    running.says("starting the trainers")
    running.signal(signal.SIGKILL)
    running.wait()
    other_place = tmp_path / "another laptop"
    other_place.mkdir()
    for name in ("conf.py", "tasks.py"):
        shutil.copy(two.folder / name, other_place)
    two.gone(90)
    status = two.inv("status", "--json", cwd=other_place).ends(0).json
    assert (status["job"], status["state"], status["outcome"]["victims"]) == (job, "succeeded", [])
    assert {p["state"] for p in status["processes"] if p["role"] == "trainer"} == {"done"}
    two.inv("fetch", "--to", "results", cwd=other_place).ends(0)
    assert {path.name for path in (other_place / "results").iterdir()} == {"model.npz", "word_dict.txt"}
