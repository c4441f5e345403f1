"""Distribution brings the image of a job's containers to the nodes that lack it, before the job starts (decision 56).

IMAGE_FROM decides where it comes from: each node pulls it ("registry"), this machine sends it ("laptop"), or the first node
that has it does ("first").
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import replace

from clustertool.engines.caller import Caller
from clustertool.engines.send_workspace import send_from, send_whole
from clustertool.errors import BadAnswer, ClustertoolError, ConfigError, DispatchError, NotFound, raise_all
from clustertool.fleet.dispatch import saved_images
from clustertool.fleet.dispatch.saved_images import LocalImage
from clustertool.fleet.dispatch.shipment import RemoteShipment
from clustertool.fleet.fleet import Fleet
from clustertool.model.container import container_runtimes
from clustertool.model.container.container_runtimes import APPTAINER, FIRST, LAPTOP
from clustertool.model.container.container_settings import ContainerSettings
from clustertool.model.facts import ByNode, ContainerFacts
from clustertool.model.quantities import count, human_bytes
from clustertool.model.wire.agent_answers import ImageAnswer, SavedImageAnswer
from clustertool.model.wire.agent_requests import ImageCopy, ImageRequest
from clustertool.model.wire.messages import LOAD_IMAGE, PULL_IMAGE, SAVE_IMAGE, Answered, Request
from clustertool.ssh.parallel import Gathered, each

_SILENCE = 600.0  # seconds in which a node that pulls, saves or loads an image may read and write nothing
_BUILD = "apptainer build FILE.sif IMAGE, and give the path of that file as the image"
Known = dict[int, ContainerFacts]  # by node


class ImageDistribution:
    """The distribution of one image to nodes: call run() once. facts: of these nodes, with the runtimes found there."""

    def __init__(self, caller: Caller, fleet: Fleet, settings: ContainerSettings, facts: ByNode) -> None:
        self._caller, self._fleet, self._settings, self._facts = caller, fleet, settings, facts
        self._known: Known = {node: fact.container or ContainerFacts() for node, fact in facts.items()}

    def run(self) -> Known:
        """Bring the image to all nodes by IMAGE_FROM, and return each node's container facts with the image that it has then.

        For "registry" the nodes without the image pull it, all with pull = "always". Raises the errors of all nodes together.
        """
        image_from = self._fleet.cluster.image_from
        if image_from == LAPTOP:
            self._send_from_laptop()
        elif image_from == FIRST:
            self._send_from_first()
        else:
            lacking = [node for node, one in self._known.items() if not one.image_id]
            self._pull(list(self._known) if self._settings.pull == "always" else lacking)
        return self._known

    def _pull(self, nodes: Sequence[int]) -> None:
        """Have these nodes pull the image, PULLS_AT_ONCE at a time, and record what they have then; nothing without nodes.

        Raises NotFound for each node if pull is "never", and the errors of all nodes together.
        """
        if nodes and self._settings.pull == "never":
            what = f'the image {self._settings.image} is not there, and pull is "never"'
            raise_all([NotFound(what, 'set pull to "missing"', self._fleet.name(node)) for node in nodes])
        requests = {node: PULL_IMAGE(self._image_request(node)) for node in nodes}
        self._record_images(self._ask_nodes("image: pull", requests, container_runtimes.PULLS_AT_ONCE).all())

    # -- this machine sends it --

    def _send_from_laptop(self) -> None:
        """Send the image of this machine to the nodes that have none or another one, and have them load it.

        Pull it here before, if it is not here, or with pull = "always", which has no effect on a .sif file. Raises NotFound if
        it is not here and pull is "never", DispatchError for nodes without room, and the errors of all nodes together.
        """
        settings = self._settings
        local = saved_images.find(settings.runtime, settings.image)
        if not local.id or settings.pull == "always" and not container_runtimes.is_file(settings.image):
            local = self._pull_here(local)
        lacking = [node for node, one in self._known.items() if one.image_id != local.id]
        if not lacking:
            return
        kind = self._choose_copy(local.runtime, lacking)
        self._caller.note(f"image: {local.name}, {human_bytes(local.bytes)} on this machine")
        saved = saved_images.save(local, kind, self._caller.check)
        lacking = [node for node in lacking if self._known[node].image_id != saved.id]  # an archive may have another id
        facts, workspace = {node: self._facts[node] for node in lacking}, saved.workspace
        if not facts:
            return
        self._require_room(workspace.release, workspace.size, kind, facts)
        self._caller.note(f"image: sending {human_bytes(workspace.size)} to {count(len(facts), 'node')}")
        send_whole(self._caller, self._fleet, workspace, facts)
        self._load(lacking, {"release": workspace.release, "kind": kind, "image_id": saved.id, "bytes": saved.bytes})

    def _pull_here(self, local: LocalImage) -> LocalImage:
        """Pull the image to this machine with a message, and return it as it is then. Raises NotFound if pull is "never"."""
        if self._settings.pull == "never":
            what = f'the image {self._settings.image} is not on this machine, and pull is "never"'
            raise NotFound(what, 'build or load it here, or set pull to "missing"')
        self._caller.note(f"image: pulling {self._settings.image} to this machine")
        return saved_images.pull(local, self._caller.check)

    # -- the first node that has it sends it --

    def _send_from_first(self) -> None:
        """Have the first node with the image send it to the nodes that have none or another one; they load it then.

        If no node has it, the first one pulls it before; with pull = "always" the first node with it does. Raises ConfigError
        if RELAY is "off", NotFound if a pull is needed and pull is "never", and the errors of all nodes together.
        """
        having = [node for node, one in self._known.items() if one.image_id]
        first = having[0] if having else min(self._known)
        if not having or self._settings.pull == "always":
            self._pull([first])
        source = self._known[first]
        lacking = [node for node, one in self._known.items() if _image_identity(one) != _image_identity(source)]
        if not lacking:
            return
        kind = self._choose_copy(source.runtime, lacking)
        self._require_relays()
        name = self._fleet.name(first)
        self._caller.note(f"image: {self._settings.image}, {human_bytes(max(0, source.size))} on {name}")
        order = SAVE_IMAGE({**self._image_request(first), "image": source.image_id, "kind": kind})
        answer = self._ask_nodes("image: save", {first: order}).all()[first]
        shipment = _read_shipment(answer, name)
        facts = {node: self._facts[node] for node in (first, *lacking)}
        self._require_room(answer["release"], shipment.size, kind, {node: facts[node] for node in lacking})
        self._caller.note(f"image: {name} sends {human_bytes(shipment.size)} to {count(len(lacking), 'node')}")
        sent = send_from(self._caller, self._fleet, first, answer["release"], shipment, facts)
        raise_all(list(sent.failed.values()))
        size = max(0, source.size)
        self._load(lacking, {"release": answer["release"], "kind": kind, "image_id": answer["image_id"], "bytes": size})

    def _require_relays(self) -> None:
        """Raise ConfigError if RELAY is "off": the nodes cannot send the image to one another."""
        if self._fleet.cluster.relay == "off":
            what = 'IMAGE_FROM = "first" lets nodes send the image to one another, and RELAY is "off"'
            raise ConfigError(what, 'RELAY = "auto", or IMAGE_FROM = "laptop" or "registry"')

    # -- both --

    def _choose_copy(self, runtime: str, lacking: Sequence[int]) -> str:
        """Choose the form of a copy that all nodes of `lacking` can load, and `runtime`, which has the image, can make.

        See kind_of_copy(). Raises ConfigError if some of these runtimes are apptainer, and others are not.
        """
        runtimes = {runtime, *(self._known[node].runtime for node in lacking)}
        if APPTAINER in runtimes and len(runtimes) > 1:
            others = [self._fleet.name(node) for node in lacking if self._known[node].runtime != runtime]
            raise ConfigError(f"{', '.join(others)}: apptainer and {runtime} cannot load each other's images", _BUILD)
        return container_runtimes.kind_of_copy(sorted(runtimes))

    def _require_room(self, release: str, size: int, kind: str, facts: ByNode) -> None:
        """Raise the DispatchErrors of all nodes whose ROOT_DIR has not enough room for the image; do nothing if none lacks it.

        A node needs `size` bytes for the release, unless it has that, and as many again to load it, except from an archive.
        kind: see container_runtimes.kind_of_copy(). Nodes whose free space is not known are not checked.
        """
        raised: list[ClustertoolError] = []
        for node, fact in facts.items():
            need = size * ((release not in fact.releases) + (kind != container_runtimes.COPY_ARCHIVE))
            if 0 <= fact.disk_free < need:
                free = human_bytes(fact.disk_free)
                what = f"the files of the image need {human_bytes(need)} in ROOT_DIR, and {free} are free"
                raised.append(DispatchError(what, "make room, or choose another ROOT_DIR", self._fleet.name(node)))
        raise_all(raised)

    def _load(self, nodes: Sequence[int], copy: ImageCopy) -> None:
        """Have nodes load the image from their copy, all at once, and record what they have then.

        Raises the errors of all nodes together, and DispatchError for nodes where the image has another id than `copy`, unless
        the copy is a .sif file.
        """
        requests = {node: LOAD_IMAGE({**self._image_request(node), **copy}) for node in nodes}
        loaded = self._ask_nodes("image: load", requests).all()
        self._record_images(loaded)
        if copy["kind"] != container_runtimes.COPY_FILE:  # the pieces of a file have been compared
            wrong = {node: one["image_id"] for node, one in loaded.items() if one["image_id"] != copy["image_id"]}
            text = f"the image has the id {{!r}} there after it was loaded, and its copy has {copy['image_id']!r}"
            raise_all([DispatchError(text.format(id), "", self._fleet.name(node)) for node, id in wrong.items()])

    def _record_images(self, answers: Mapping[int, ImageAnswer]) -> None:
        """Record the id, digest and size of the image in each answer as that of the node."""
        for node, one in answers.items():
            known = self._known[node]
            self._known[node] = replace(known, image_id=one["image_id"], digest=one["digest"], size=one["size"])

    def _image_request(self, node: int) -> ImageRequest:
        """Build the part of a request that names the node's runtime, its program and the image."""
        one = self._known[node]
        return {"runtime": one.runtime, "program": one.program, "image": self._settings.image}

    def _ask_nodes(
        self, phase: str, requests: Mapping[int, Request[Answered]], width: int | None = None
    ) -> Gathered[Answered]:
        """Send requests, {node: request}, to nodes, show the progress, and return the answers and the errors by node.

        An answer may take as long as the node is not silent for 600 s. width: how many at a time; None: all.
        """
        if not requests:
            return Gathered()
        fleet, caller = self._fleet, self._caller
        with caller.working(phase, [fleet.name(node) for node in requests]) as view:

            def do(node: int) -> Answered:
                try:
                    answer = fleet.ask_one(node, requests[node], _SILENCE)
                except ClustertoolError:
                    view.failed(fleet.name(node))
                    raise
                view.done(fleet.name(node))
                return answer

            def check() -> None:
                view.turn()
                caller.check()

            return each({node: node for node in requests}, do, width=width or len(requests), check=check)


def _image_identity(one: ContainerFacts) -> str:
    """Return the digest of a .sif file, else the id of the image; equal images have equal ones."""
    return one.digest if one.runtime == APPTAINER else one.image_id


def _read_shipment(answer: SavedImageAnswer, name: str) -> RemoteShipment:
    """Parse the packed list of an image's files in a node's answer. Raises BadAnswer if it is damaged. name: of the node."""
    try:
        return RemoteShipment(binascii.a2b_base64(answer["packed"]), answer["bytes"])
    except (ValueError, LookupError, TypeError):
        raise BadAnswer("its list of the files of an image is damaged", "run it again", name) from None
