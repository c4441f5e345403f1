"""A version of paramiko without one of the private names that the tool needs ends a command with a clear error."""

from __future__ import annotations

import ast
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
    done = subprocess.run([*CLUSTERTOOL, "jobs"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 78, done.stderr
    assert f"paramiko {paramiko.__version__} is not supported: it has no Channel._close_internal" in done.stderr
    assert f'{sys.executable} -m pip install "{paramiko_fixes.SUPPORTED}"' in done.stderr
    assert "Traceback" not in done.stderr


def test_every_private_name_that_the_package_uses_is_checked() -> None:
    kinds = paramiko_fixes._PRIVATE
    private = {name for kind in kinds for name in dir(kind) if name.startswith("_") and not name.startswith("__")}
    used = set()
    for path in (*(REPO / "clustertool/ssh").glob("*.py"), *(REPO / "clustertool/fleet").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.ClassDef):
                used |= {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                targets = [one.targets for one in node.body if isinstance(one, ast.Assign)]
                used |= {name.id for names in targets for name in names if isinstance(name, ast.Name)}
    of_ours = {"_lookup"}  # a method of host_keys.py has the name of one of SSHConfig
    unchecked = (used & private) - of_ours - {name for names in kinds.values() for name in names.split()}
    assert unchecked == set()


def test_the_error_names_what_setup_cfg_allows() -> None:
    setup = configparser.ConfigParser()
    setup.read(REPO / "setup.cfg")
    assert paramiko_fixes.SUPPORTED in setup["options"]["install_requires"].splitlines()
