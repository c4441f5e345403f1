"""word2vec learns, ends, and fails plainly: its real programs run as real processes on loopback."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Job, Program

if not importlib.util.find_spec("numpy"):
    pytest.skip("needs numpy", allow_module_level=True)

PREPARE = Path(__file__).resolve().parents[2] / "workspaces" / "word2vec" / "prepare.py"
NOTHING_KNOWN = 4.1589  # 6 ln 2: the loss of one pair and five counter-examples before the first step
FOREVER = ("--epochs", "100000")
QUICKLY = 60.0  # seconds; loose, for machines with much else to do


def prepare(out: Path, *args: str, **env: str) -> str:
    argv = [sys.executable, str(PREPARE), "--out", str(out), *args]
    return subprocess.run(argv, check=True, capture_output=True, text=True, env={**os.environ, **env}).stdout


@pytest.fixture
def job(job_of) -> Job:
    return job_of("word2vec")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What prepare.py writes for 5 shards."""
    folder = tmp_path_factory.mktemp("data") / "a"
    prepare(folder, "--shards", "5", PYTHONHASHSEED="1")
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """small(JOB, SHARDS): data for a quick training, the frequent words only."""
    made: dict[int, Path] = {}

    def add(job: Job, shards: int = 4) -> None:
        if shards not in made:
            made[shards] = tmp_path_factory.mktemp("small") / "data"
            prepare(made[shards], "--shards", str(shards), "--min-count", "20")
        shutil.copytree(made[shards], job.workspace / "train_data_dir")

    return add


def losses(program: Program) -> list[float]:
    return [float(loss) for loss in re.findall(r" loss=(\S+)", program.text)]


def neighbours(program: Program) -> dict[str, list[str]]:
    found = re.findall(r"^nearest to (\w+): (.*)$", program.text, re.M)
    return {word: near.split() for word, near in found}


def assert_learned(job: Job, trainers: list[Program], barrier: bool = True) -> None:
    assert [trainer.wait() for trainer in trainers] == [0] * len(trainers), [t.text for t in trainers]
    for trainer in trainers:
        assert losses(trainer)[0] > 3.9 or not barrier, (
            "who is late without a barrier begins with what the first one learnt"
        )
        assert losses(trainer)[-1] < 3.0, trainer.text
    import numpy as np  # not at the top: each worker would import it when it collects the tests

    with np.load(job.output / "model.npz") as model:
        words = (job.output / "word_dict.txt").read_text().splitlines()
        assert model["vectors"].shape == model["contexts"].shape == (len(words), 48)
        assert np.isfinite(model["vectors"]).all()
    assert len(neighbours(trainers[0])) >= 4
    assert not any(neighbours(trainer) for trainer in trainers[1:]), "only trainer 0 writes the model"


def assert_stops(pservers: list[Program]) -> None:
    for pserver in pservers:
        pserver.popen.terminate()
    assert {pserver.wait(QUICKLY) for pserver in pservers} <= {0, -signal.SIGTERM}, [p.text for p in pservers]
    assert not any("Traceback" in pserver.text for pserver in pservers)


# ---- the data


def test_prepare_writes_the_same_bytes_every_time(written: Path, tmp_path: Path) -> None:
    """Files of a former run go, and what is written does not depend on the order of sets."""
    prepare(tmp_path / "b", "--shards", "9")
    prepare(tmp_path / "b", "--shards", "5", PYTHONHASHSEED="2")
    files = {path.name: path.read_bytes() for path in written.iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    assert sorted(files) == [f"train.txt-{n:05d}" for n in range(5)] + ["word_dict.txt"]


def test_dictionary_is_sorted_and_is_no_shard(written: Path) -> None:
    rows = [line.split() for line in (written / "word_dict.txt").read_text().splitlines()]
    counts = [int(count) for _, count in rows]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= 6
    assert {"class", "function", "string", "import"} <= {word for word, _ in rows}
    text = " ".join(path.read_text() for path in written.glob("*-[0-9]*")).split()
    assert {word: text.count(word) for word, _ in rows[:20]} == {word: int(n) for word, n in rows[:20]}


def test_shards_are_of_one_size(written: Path) -> None:
    sizes = [len(path.read_text().split()) for path in sorted(written.glob("*-[0-9]*"))]
    assert len(sizes) == 5
    assert max(sizes) < 1.05 * min(sizes)


# ---- training


@pytest.mark.parametrize("mode, epochs", [("--sync", 2), ("--async", 1)])
def test_it_learns(job, small, mode, epochs):
    """Port checks and strangers at a pserver are no trainers; the last one says nothing, and stays."""
    small(job)
    pservers = job.start_pservers(2, trainers=2)
    host, port = pservers[0].endpoint.split(":")
    for greeting in (b"GET / HTTP/1.1\r\nHost: pserver\r\n\r\n", struct.pack("<4sBII", b"w2v1", 4, 0, 0)):
        with socket.create_connection((host, int(port)), timeout=30) as stranger:
            stranger.sendall(greeting)  # the second is LEAVE without HELLO
            assert stranger.recv(100) == b""
    with socket.create_connection((host, int(port)), timeout=30):
        trainers = job.start_trainers(2, mode, "--epochs", str(epochs), "--report", "0.2")
        assert_learned(job, trainers, barrier=mode == "--sync")
    first = losses(trainers[0])[0] if mode == "--sync" else max(losses(trainer)[0] for trainer in trainers)
    assert first == pytest.approx(NOTHING_KNOWN, abs=0.01)
    assert_stops(pservers)


@pytest.mark.chaos
def test_neighbours_make_sense(job):
    prepare(job.workspace / "train_data_dir")
    job.start_pservers(2, trainers=2)
    trainers = job.start_trainers(2, "--epochs", "8")
    assert_learned(job, trainers)
    near = neighbours(trainers[0])
    assert {"raised", "handler", "clause", "handled"} & set(near["exception"])
    assert {"module", "imported", "bar", "baz"} & set(near["import"])
    assert {"strings", "characters", "suffix", "prefix", "chars"} & set(near["string"])


@pytest.mark.chaos
@pytest.mark.parametrize("shards, count", [(3, 2), (2, 3)])
def test_uneven_shards_do_not_block_a_step(job, small, shards, count):
    small(job, shards)
    pservers = job.start_pservers(2, count)
    trainers = job.start_trainers(count, "--epochs", "4", "--batch", "256")
    assert [trainer.wait() for trainer in trainers] == [0] * count
    steps = [sum(map(int, re.findall(r"trained steps=(\d+)", trainer.text))) for trainer in trainers]
    assert max(steps) > 1.4 * min(steps)
    assert (job.output / "model.npz").exists()
    assert_stops(pservers)


@pytest.mark.chaos
def test_the_model_does_not_depend_on_the_number_of_pservers(job, small):
    import numpy as np

    small(job, shards=1)
    models = []
    for count in (1, 3):
        job.start_pservers(count, trainers=1)
        assert job.start_trainers(1, "--epochs", "1")[0].wait() == 0
        with np.load(job.output / "model.npz") as model:
            models.append(model["vectors"])
    np.testing.assert_array_equal(*models)


@pytest.mark.chaos
def test_train_py_is_the_pserver_when_its_role_says_so(job, small):
    small(job, shards=1)
    pservers = job.start_pservers(1, trainers=1, script="train.py")
    assert_learned(job, job.start_trainers(1, "--epochs", "8", "--report", "0.2"))
    assert_stops(pservers)


@pytest.mark.chaos
def test_it_learns_over_ipv6(job, small):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    small(job, shards=1)
    pservers = job.start_pservers(2, trainers=1, ip="[::1]")
    assert_learned(job, job.start_trainers(1, "--epochs", "8", "--report", "0.2"))
    assert_stops(pservers)


# ---- failures


def training(trainers: list[Program]) -> None:
    """Wait until all are past their first step."""
    for trainer in trainers:
        trainer.says("loss=", times=2)


@pytest.mark.parametrize("mode", ["--sync", pytest.param("--async", marks=pytest.mark.chaos)])
def test_a_lost_pserver_ends_the_trainers(job, small, mode):
    small(job)
    pservers = job.start_pservers(2, trainers=2)
    trainers = job.start_trainers(2, mode, *FOREVER, "--report", "0.1")
    training(trainers)
    pservers[1].popen.kill()
    assert [trainer.wait(QUICKLY) for trainer in trainers] == [1, 1]
    complaints = [[line for line in trainer.lines if "loss=" not in line][1:] for trainer in trainers]
    assert [len(complaint) for complaint in complaints] == [1, 1], complaints
    assert f"lost pserver 1 at {pservers[1].endpoint}" in complaints[0][0] + complaints[1][0]
    assert_stops(pservers[:1])


def test_a_lost_trainer_ends_the_others_in_sync_mode(job, small):
    small(job)
    pservers = job.start_pservers(1, trainers=3)
    trainers = job.start_trainers(3, *FOREVER, "--report", "0.1")
    training(trainers)
    trainers[1].popen.kill()
    assert [trainers[rank].wait(QUICKLY) for rank in (0, 2)] == [1, 1]
    assert all("another trainer died" in trainers[rank].lines[-1] for rank in (0, 2))
    pservers[0].says("lost trainer 1")
    assert_stops(pservers)


@pytest.mark.chaos
def test_a_lost_trainer_does_not_stop_async_training(job, small):
    small(job, shards=2)
    pservers = job.start_pservers(2, trainers=2)
    trainers = job.start_trainers(2, "--async", "--epochs", "12", "--report", "0.05")
    training(trainers)
    trainers[1].popen.kill()
    assert trainers[1].wait() == -signal.SIGKILL
    assert trainers[0].wait() == 0
    assert (job.output / "model.npz").exists()
    assert_stops(pservers)


def test_without_data_it_names_the_fix(job):
    (job.workspace / "train_data_dir").mkdir()
    (trainer,) = job.start_trainers(1)
    assert trainer.wait() == 65
    assert trainer.lines == [
        "no train_data_dir/word_dict.txt: run `python workspaces/word2vec/prepare.py` before `inv run`"
    ]


def test_outside_a_job_it_names_the_fix(job):
    for name, missing in (("train.py", "PADDLE_TRAINER_ID"), ("pserver.py", "POD_IP")):
        program = job.start(name, env={})
        assert program.wait() == 1
        assert program.lines == [f"'{missing}' is not set; start this with `inv run --workspace workspaces/word2vec`"]


def test_trainers_that_disagree_are_reported(job, small):
    small(job)
    (pserver,) = job.start_pservers(1, trainers=2)
    (first,) = job.start_trainers(1, *FOREVER)
    pserver.says("holds")
    (other,) = job.start_trainers(1, "--dim", "32")
    assert other.wait() == 1
    assert "do not agree" in other.text
    assert first.popen.poll() is None
