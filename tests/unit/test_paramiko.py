"""A version of paramiko without one of the private names that the tool needs ends a command with a clear error."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import paramiko

from clustertool.ssh import paramiko_fixes
from tests.cli import CLUSTERTOOL, REPO


def test_a_version_that_lacks_a_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import paramiko\ndel paramiko.Channel._close_internal\n")
    (tmp_path / "conf.py").write_text('HOSTS = ["127.0.0.1"]\n')
    env = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{REPO}"}
    done = subprocess.run([*CLUSTERTOOL, "jobs"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 78, done.stderr
    assert f"paramiko {paramiko.__version__} is not supported: it has no Channel._close_internal" in done.stderr
    assert f'{sys.executable} -m pip install "{paramiko_fixes.SUPPORTED}"' in done.stderr
    assert "Traceback" not in done.stderr


def test_the_error_names_what_setup_cfg_allows() -> None:
    setup = configparser.ConfigParser()
    setup.read(REPO / "setup.cfg")
    assert paramiko_fixes.SUPPORTED in setup["options"]["install_requires"].splitlines()
