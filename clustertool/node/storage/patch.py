"""A patch builds a release from an existing one that differs little, with one request and without a relay."""

from __future__ import annotations

import binascii
from typing import TYPE_CHECKING

from clustertool.errors import DispatchError
from clustertool.model.dispatch import manifest
from clustertool.node.storage.release_store import Store, no_room
from clustertool.node.system.node_context import NodeContext

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import PatchAnswer
    from clustertool.model.wire.agent_requests import PatchRequest


def patch(node: NodeContext, request: PatchRequest) -> PatchAnswer:
    """Make a release of a base.

    Answers {"have": False} where the base is not what the laptop thinks it is; then the release comes the long way.
    """
    store = Store(node.root)
    try:
        text = manifest.apply(store.manifest(request["base"]), request["steps"])
    except (OSError, ValueError, UnicodeError):
        return {"have": False}
    if manifest.name_of(text) != request["manifest"]:
        return {"have": False}
    rows = manifest.take(manifest.read_rows(text), request["groups"])
    sizes = {piece.name: piece.size for piece in manifest.pieces(rows)}
    missing = set(store.missing(sizes))
    if not missing <= set(request["pieces"]):
        return {"have": False}
    try:
        for name in sizes.keys() & request["pieces"].keys():  # those that the base does not name
            if name in missing and not store.add(name, binascii.a2b_base64(request["pieces"][name])):
                return {"have": False}
            store.sync(name)
        store.complete(request["release"], text if request["groups"] is None else manifest.text_of(rows))
        store.prune()
    except OSError as error:
        what = f"the release cannot be written below {store.top}: {error.strerror}"
        raise DispatchError(what, no_room(error)) from None
    return {"have": True}
