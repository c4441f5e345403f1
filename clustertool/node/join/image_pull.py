"""The image of a job in containers on a machine that joins. No laptop brings images there, so each machine pulls its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clustertool.model.container.container_names import ALWAYS, NEVER
from clustertool.node.container.image_store import pull_image

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import ContainerAnswer
    from clustertool.node.system.node_context import NodeContext


def pull_wanted(node: NodeContext, known: ContainerAnswer, image: str, pull: str) -> None:
    """Pull the image where that is wanted, and add it to the facts of the runtime. pull: as in CONTAINER. Raises DispatchError,
    NotFound."""
    if not known["runtime"] or pull == NEVER or (known["image_id"] and pull != ALWAYS):
        return
    found = pull_image(node, {"runtime": known["runtime"], "program": known["program"], "image": image})
    known["image_id"], known["digest"], known["size"] = found["image_id"], found["digest"], found["size"]
