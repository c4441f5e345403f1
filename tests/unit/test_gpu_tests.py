"""The tests of `make test-gpu` do not pass where there is nothing to test."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.cli import REPO


def test_they_fail_without_a_gpu_or_a_framework() -> None:
    """With DEMAND_GPU=1, which `make test-gpu` sets. TORCH_PYTHON is no Python, so they fail on a machine with a GPU, too."""
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", "-m", "gpu", "-k", "nccl"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    kept["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they need no plugin
    for demand, code, outcome in (("1", 1, "1 error"), ("", 0, "1 skipped")):
        env = {**kept, "TORCH_PYTHON": "/bin/false", "DEMAND_GPU": demand}
        done = subprocess.run(argv, cwd=REPO, env=env, capture_output=True, text=True, timeout=60)
        assert (done.returncode, re.search("needs (an NVIDIA GPU|PyTorch)", done.stdout) is not None) == (code, True)
        assert outcome in done.stdout
    assert re.search(r"^test-gpu: export DEMAND_GPU := 1$", (REPO / "Makefile").read_text(), re.M)
