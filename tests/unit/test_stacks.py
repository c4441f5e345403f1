"""Stacks as py-spy prints them (tests/data/py-spy) become records, and equal ones are gathered with their ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clustertool.model.job.stacks import (
    Frame,
    ProcessSample,
    StackGroup,
    ThreadStack,
    gather,
    own_frame,
    read_dump,
    short_file,
)
from clustertool.model.shape import Malformed, read
from clustertool.show.stack_view import place, stack_lines

DUMPS = Path(__file__).parent.parent / "data" / "py-spy"
JOB = "/home/ann/job"
LIBRARY, PACKAGES = "/usr/lib/python3.11", "/home/ann/venv/lib/python3.11/site-packages"
STEP = Frame("step", f"{JOB}/train.py", 88)
LOAD = Frame("load", f"{JOB}/data.py", 12)
MAIN = Frame("<module>", f"{JOB}/train.py", 99)
REDUCE = [
    Frame("all_reduce", f"{PACKAGES}/torch/distributed/distributed_c10d.py", 2810),
    Frame("wrapper", f"{PACKAGES}/torch/distributed/c10d_logger.py", 83),
]


def dump(name: str) -> list[Any]:
    found: list[Any] = json.loads((DUMPS / f"{name}.json").read_text())
    return found


def parsed(found: list[Any]) -> tuple[ThreadStack, ...]:
    return read_dump(json.dumps(found), dump("lock-nonblocking")[0]["pid"])


def process(rank: int, *threads: ThreadStack, child: bool = False, note: str = "", **more: Any) -> ProcessSample:
    fields = {"role": "trainer", "command": "python3", "folder": JOB, "state": "S", **more}
    return ProcessSample(rank=rank, pid=100 + rank, child=child, note=note, threads=threads, **fields)


def stack(*frames: Frame, name: str = "", call: str = "") -> ThreadStack:
    return ThreadStack(name, frames, None, call)


def texts(samples: list[ProcessSample], whole: bool = False) -> list[str]:
    return [text for text, _ in stack_lines(gather(samples), whole)]


# -- what py-spy prints


def test_the_main_thread_comes_first_and_has_no_name() -> None:
    main, reader = parsed(dump("lock-nonblocking"))
    assert (main.thread_name, reader.thread_name) == ("", "reader")
    assert [frame.name for frame in main.frames] == [
        "Thread._wait_for_tstate_lock",
        "Thread.join",
        "step",
        "<module>",
    ]
    assert main.frames[2] == Frame("step", f"{JOB}/train.py", 11)
    assert reader.frames[0] == Frame("worker", f"{JOB}/train.py", 7)


def test_the_main_thread_is_known_by_its_name_where_the_kernel_has_another_number() -> None:
    found = dump("lock-nonblocking")
    for thread in found:
        thread["os_thread_id"] = None
    assert [thread.thread_name for thread in parsed(found)] == ["", "reader"]


def test_the_main_thread_is_known_by_its_first_frame_without_names_and_numbers() -> None:
    found = dump("lock-nonblocking")
    for thread in found:
        thread.update(os_thread_id=None, thread_name=None)
    assert [thread.thread_name for thread in parsed(found)] == ["", "?"]


def test_addresses_of_native_code_do_not_count() -> None:
    """They differ between processes, and equal stacks would not be equal."""
    main, _ = parsed(dump("lock-native"))
    other = main._replace(frames=(main.frames[0]._replace(name="0x7f0000000000"), *main.frames[1:]))
    (group,) = gather([process(0, main), process(1, other)])
    assert (group.ranks, group.frames[0]) == ((0, 1), Frame("?", "/usr/lib/x86_64-linux-gnu/libc.so.6", 0))
    assert group.frames[group.own].name == "step"


def test_what_a_program_has_written_into_its_memory_is_limited() -> None:
    found = dump("lock-nonblocking")
    frame = {**found[0]["frames"][0], "name": "a\x1b[31m\n" + "b" * 4000}
    found[0].update(thread_name="x" * 4000, frames=[frame] * 1000)
    _, thread = parsed(found)
    assert len(thread.frames) == 200
    found[0]["frames"] = [frame] * 2
    assert len(parsed(found * 300)) == 200
    sample = process(3, *parsed(found * 300))
    assert read(ProcessSample, json.loads(json.dumps(sample))) == sample
    for field in ("name", "filename"):
        found[0]["frames"] = [{**frame, field: "x" * 5000}]
        with pytest.raises(ValueError, match="5000 characters"):
            parsed(found)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "7",
        "[7]",
        '[{"thread_name": null, "os_thread_id": 7, "frames": [7]}]',
        '[{"thread_name": 7, "os_thread_id": 7, "frames": []}]',
        '[{"thread_name": "a", "os_thread_id": 7, "frames": [{"name": "f", "filename": "a", "line": 1.5}]}]',
        '[{"thread_name": "a", "os_thread_id": 7, "frames": [{"name": null, "filename": "a", "line": 1}]}]',
    ],
)
def test_what_is_no_dump_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        read_dump(text, 7)


@pytest.mark.parametrize(
    "field, value", [("role", "king"), ("rank", -1), ("child", "yes"), ("threads", [["", [["f"]]]])]
)
def test_a_sample_of_a_node_is_checked(field: str, value: object) -> None:
    with pytest.raises(Malformed):
        read(ProcessSample, json.loads(json.dumps({**process(0)._asdict(), field: value})))


# -- the user's own code


@pytest.mark.parametrize(
    "frames, own",
    [
        ([], -1),
        ([*REDUCE, STEP, MAIN], 2),
        ([LOAD, STEP], 0),
        ([Frame("wait", f"{LIBRARY}/threading.py", 327), STEP], 1),
        # a file below the job's directory comes before one of the user elsewhere
        ([Frame("helper", "/home/ann/shared/tools.py", 5), STEP], 1),
        ([*REDUCE, Frame("helper", "/home/ann/shared/tools.py", 5)], 2),
        # a virtual environment in the job's directory
        ([Frame("forward", f"{JOB}/.venv/lib/python3.10/site-packages/torch/nn/modules/module.py", 1), STEP], 1),
        ([Frame("f", "/usr/lib/python3/dist-packages/numpy/core.py", 1), STEP], 1),
        ([Frame("load", "<string>", 3)], 0),
        ([Frame("_call_with_frames_removed", "<frozen importlib._bootstrap>", 241), MAIN], 1),
        ([Frame("main", "train.py", 7)], 0),  # Python 3.8 has the name as it was typed
        ([Frame("loop", f"{JOB}/fast.so", 0), STEP], 1),
        ([Frame("f", "/home/ann/python3-course/lib/a.py", 2)], 0),
        ([Frame("f", "", 0)], -1),
    ],
)
def test_the_innermost_frame_of_the_users_own_code(frames: list[Frame], own: int) -> None:
    assert own_frame(frames, JOB) == own


@pytest.mark.parametrize(
    "file, short",
    [
        (f"{JOB}/sub/data.py", "sub/data.py"),
        (f"{PACKAGES}/torch/a.py", "torch/a.py"),
        (f"{LIBRARY}/threading.py", "threading.py"),
        ("/usr/local/lib/python3.13t/queue.py", "queue.py"),
        ("/home/ann/jobs/train.py", "/home/ann/jobs/train.py"),
        (f"{JOB}.py", f"{JOB}.py"),
        ("<string>", "<string>"),
    ],
)
def test_files_are_short(file: str, short: str) -> None:
    assert short_file(file, JOB) == short


# -- equal stacks


def test_equal_stacks_are_gathered_with_their_ranks() -> None:
    waits = [process(rank, stack(*REDUCE, STEP, MAIN, call="futex")) for rank in range(31)]
    sleeps = process(31, stack(LOAD, MAIN, call="clock_nanosleep"))
    assert texts([sleeps, *waits]) == [
        "trainer 0-30: all_reduce <- train.py:88 step",
        "    all_reduce (torch/distributed/distributed_c10d.py:2810)",
        "    wrapper (torch/distributed/c10d_logger.py:83)",
        "  > step (train.py:88)",
        "    <module> (train.py:99)",
        "trainer 31: clock_nanosleep <- data.py:12 load",
        "  > load (data.py:12)",
        "    <module> (train.py:99)",
    ]


def test_nodes_may_have_the_job_in_different_directories() -> None:
    there = "/mnt/node1/JOB7"
    one = process(0, stack(STEP))
    other = process(1, stack(STEP._replace(filename=f"{there}/train.py")), folder=there)
    (group,) = gather([other, one])
    assert (group.ranks, place(group)) == ((0, 1), "train.py:88 step")


def test_another_call_of_the_kernel_is_no_other_stack() -> None:
    (group,) = gather([process(0, stack(LOAD, call="read")), process(1, stack(LOAD, call="futex"))])
    assert (group.ranks, group.call, place(group)) == ((0, 1), "", "data.py:12 load")


def test_another_line_is_another_stack() -> None:
    groups = gather([process(0, stack(STEP)), process(1, stack(STEP._replace(line=89)))])
    assert [group.ranks for group in groups] == [(0,), (1,)]


def test_threads_and_child_processes_follow_the_ranks_own_programs() -> None:
    worker, other = stack(LOAD, name="Thread-1"), stack(LOAD, name="Thread-2")
    samples = [
        process(0, stack(LOAD), child=True),
        process(0, stack(LOAD), child=True),
        process(0, stack(STEP), worker, other),
        process(1, stack(STEP), worker),
        process(0, stack(STEP), role="pserver"),
        process(1, note="no Python", child=True, command="sh"),
    ]
    assert [line for line in texts(samples) if line[0] != " "] == [
        "trainer 0-1: train.py:88 step",
        "trainer 0-1 thread Thread-1 (3 of them): data.py:12 load",
        "trainer 0 child python3 (2 of them): data.py:12 load",
        "trainer 1 child sh: no Python",
        "pserver 0: train.py:88 step",
    ]


def test_a_process_without_a_stack_of_python_is_named_with_the_reason() -> None:
    call = stack(Frame("pipe_read", "", 0), Frame("read", "", 0))
    assert texts([process(0, call, note="no Python"), process(1, note="stopped by a signal (SIGSTOP)")]) == [
        "trainer 0: pipe_read <- read (no Python)",
        "trainer 1: stopped by a signal (SIGSTOP)",
    ]


def test_a_stack_without_code_of_the_user() -> None:
    assert texts([process(0, stack(*REDUCE[:1]))]) == [
        "trainer 0: all_reduce (torch/distributed/distributed_c10d.py:2810)"
    ]
    assert texts([process(0, stack())]) == ["trainer 0: no Python code runs"]


def test_frames_far_from_the_users_code_are_left_out_unless_all_are_wanted() -> None:
    deep = [Frame(f"f{at}", f"{LIBRARY}/queue.py", at + 1) for at in range(20)]
    sample = process(0, stack(*deep, STEP, *[MAIN] * 10))
    shown, whole = texts([sample]), texts([sample], whole=True)
    assert shown[0] == whole[0] == "trainer 0: f0 <- train.py:88 step"
    assert shown[7] == "    ... 11 frames"
    assert shown[-3:] == ["  > step (train.py:88)", "    <module> (train.py:99)", "    <module> (train.py:99)"]
    assert (len(shown), len(whole)) == (14, 32)


def test_native_frames_have_the_name_of_their_library() -> None:
    main, _ = parsed(dump("lock-native"))
    (group,) = gather([process(0, main)])
    assert place(group) == "PyThread_acquire_lock_timed <- train.py:11 step"
    assert "    ? (libc.so.6)" in texts([process(0, main)])


def test_a_group_is_json() -> None:
    (group,) = gather([process(0, stack(STEP))])
    assert isinstance(group, StackGroup)
    assert json.loads(json.dumps(group._asdict()))["ranks"] == [0]
