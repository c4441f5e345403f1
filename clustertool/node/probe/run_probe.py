"""The probe of `run` reads the facts of each probe, what is left of jobs, and the earlier jobs that a new one may belong to."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from clustertool.node.jobs import queries, remains
from clustertool.node.probe.probe import probe, timed
from clustertool.node.system.node_context import NodeContext

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import ProbeAnswer
    from clustertool.model.wire.agent_requests import ProbeRequest


def probe_for_run(node: NodeContext, request: ProbeRequest) -> ProbeAnswer:
    """Collect the facts of each probe, `leftovers` and `earlier`. Needs the field `earlier`."""
    began = time.monotonic()
    answer = probe(node, request)
    answer["leftovers"] = remains.without_caretakers(answer["root"], remains.living())
    answer["earlier"] = queries.list_earlier(node, request["earlier"], answer["problems"])
    return timed(answer, began)
