"""Which records of how logs grew stay."""

from __future__ import annotations

import json

import pytest

from clustertool.model.job.usage import thin_out

DAY = 86_400.0


def grow(seconds: float, logs: int, every: float = 0.5) -> tuple[bytes, int]:
    """(the file after a job of that length, the largest that it was), thinned out as the recorder does."""
    data, fresh, stayed, most = bytearray(), 0, 0, 0
    for n in range(int(seconds / every)):
        data += b"".join(b'[%.2f,"log/workerlog.%d",%d]\n' % (n * every, log, n * 1000) for log in range(logs))
        fresh += logs
        if fresh >= max(1000, stayed):
            most = max(most, len(data))
            data, fresh = bytearray(thin_out(bytes(data), n * every)), 0
            stayed = data.count(b"\n")
    return bytes(data), max(most, len(data))


@pytest.mark.parametrize("days, logs", [(0.3, 1), (0.1, 3), pytest.param(1, 1, marks=pytest.mark.chaos)])
def test_a_job_without_end_has_a_bounded_file(days: float, logs: int) -> None:
    data, most = grow(days * DAY, logs)
    assert most < 500_000 * logs
    for log in range(logs):
        times = [t for t, name, _ in map(json.loads, data.splitlines()) if name == f"log/workerlog.{log}"]
        assert times[0] == 0.0 and times[-1] > days * DAY - 1.0 and times == sorted(times)
        for before, after in zip(times, times[1:]):
            assert after - before <= max(0.6, (times[-1] - before) / 50), "old lines are too far apart"


def test_the_last_line_of_each_log_stays() -> None:
    """What is behind it in the log would come after the logs of later attempts."""
    old = b'[1.0,"log/workerlog.0",5]\n[1.1,"log/workerlog.0",9]\n'
    new = b"".join(b'[%d,"log/attempt1/workerlog.0",%d]\n' % (t, t) for t in range(9000, 10_000))
    kept = thin_out(old + new, 10_000.0)
    assert kept.startswith(old) and kept.endswith(b"9999]\n")


def test_output_before_a_long_silence_keeps_its_time() -> None:
    """What is not in a line that stays has the time of the next one: its error is bounded by its age, not by the silence."""
    times = [n * 0.5 for n in range(20)] + [3600.0 + n for n in range(20)]
    data = b"".join(b'[%.2f,"log/workerlog.0",%d]\n' % (t, n) for n, t in enumerate(times))
    for now in (4000.0, 10_000.0, 10_000_000.0):
        data = thin_out(data, now)  # again and again, as the recorder does
        left = [json.loads(line)[0] for line in data.splitlines()]
        for t in times:
            assert min(at for at in left if at >= t) - t <= max(0.0, (now - t) / 250), f"{t} at {now}"
    assert len(left) < len(times) / 3


def test_torn_lines_are_skipped() -> None:
    assert thin_out(b'[1.0,"a",5]\n[2.\n\n[3.0,"a",9]\n', 4.0) == b'[1.0,"a",5]\n[3.0,"a",9]\n'
    for foreign in (b'["x","y"]', b'{"t":null}', b'[1.0,["a"],5]', b"[" * 200_000):
        assert thin_out(foreign + b'\n[1.0,"a",5]\n', 4.0) == b'[1.0,"a",5]\n'
