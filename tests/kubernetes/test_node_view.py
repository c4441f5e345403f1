"""Nodes of a cluster, and quantities."""

from __future__ import annotations

import pytest

from clustertool.model.kubernetes.node_view import node_view, quantity


@pytest.mark.parametrize(
    ("written", "value"),
    [("2", 2), ("500m", 0.5), ("1Ki", 1024), ("32Gi", 32 * 1024**3), ("1.5G", 1.5e9), ("1e3", 1000), ("7E", 7e18)],
)
def test_quantities_are_read_as_the_api_server_reads_them(written: str, value: float) -> None:
    assert quantity(written) == pytest.approx(value)


@pytest.mark.parametrize("written", ["", "x", "-1", "1 Gi", "1gi", "nan", "1" * 40])
def test_what_is_no_quantity_is_refused(written: str) -> None:
    with pytest.raises(ValueError):
        quantity(written)


def test_a_node_has_its_allocatable_devices_and_taints() -> None:
    ready = [{"type": "Ready", "status": "True"}]
    allocatable = {"cpu": "7900m", "memory": "32Gi", "nvidia.com/gpu": "8", "amd.com/gpu": "0", "pods": "110"}
    spec = {"unschedulable": True, "taints": [{"key": "gpu", "effect": "NoSchedule"}]}
    status = {"allocatable": allocatable, "conditions": ready}
    found = node_view({"metadata": {"name": "n1"}, "spec": spec, "status": status})
    assert (found.name, found.state, found.cpus, found.memory) == ("n1", "Ready, cordoned", 7, 34359)
    assert (found.gpus, found.reason) == ((("nvidia.com/gpu", 8, 0),), "gpu:NoSchedule")


def test_a_node_that_does_not_answer() -> None:
    status = {"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]}
    assert node_view({"status": status}).state == "NotReady: NodeStatusUnknown"
