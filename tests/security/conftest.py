"""Fixtures of the tests about hostile input: private sshds, the node side without ssh, labs of namespaces."""

from __future__ import annotations

from tests.lab.conftest import lab as lab
from tests.lab.conftest import site as lab_site  # noqa: F401
from tests.node.conftest import bench as bench
from tests.node.conftest import home as home
from tests.node.conftest import join_bench as join_bench
from tests.ssh.conftest import cluster_of as cluster_of
from tests.ssh.conftest import laptop as laptop
from tests.ssh.conftest import site as site
from tests.ssh.conftest import ssh_keys as ssh_keys
from tests.ssh.conftest import start as start
