"""Distribution brings the image of a job's containers to the nodes that lack it, before the job starts (decision 56).

IMAGE_FROM decides where it comes from: each node pulls it ("registry"), or this machine sends it ("laptop").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from clustertool.engines.caller import Caller
from clustertool.engines.send_workspace import portions, send
from clustertool.errors import ClustertoolError, ConfigError, DispatchError, NotFound, PreflightError, raise_all
from clustertool.fleet.dispatch import saved_images
from clustertool.fleet.dispatch.saved_images import LocalImage, SavedImage
from clustertool.fleet.fleet import Fleet
from clustertool.model.container import image_commands as commands
from clustertool.model.container.container_settings import ContainerSettings
from clustertool.model.facts import ByNode
from clustertool.model.quantities import count, human_bytes
from clustertool.model.wire.agent_answers import ImageAnswer
from clustertool.model.wire.agent_requests import ImageRequest
from clustertool.model.wire.messages import INSPECT_IMAGE, LOAD_IMAGE, PULL_IMAGE, Request
from clustertool.ssh.parallel import Gathered, each

_SILENCE = 600.0  # seconds in which a node that pulls or loads an image may read and write nothing
Images = Mapping[int, ImageAnswer]  # by node


class ImageDistribution:
    """run() once. facts: of the nodes that get the image."""

    def __init__(self, caller: Caller, fleet: Fleet, settings: ContainerSettings, facts: ByNode) -> None:
        self._caller, self._fleet, self._settings, self._facts = caller, fleet, settings, facts

    def run(self) -> Images:
        """What each node has afterwards. Raises the errors of all nodes together."""
        if self._fleet.cluster.image_from == "laptop":
            return self._from_laptop()
        return self._from_registry()

    # -- each node pulls it --

    def _from_registry(self) -> Images:
        found = dict(self._inspect(self._settings.image))
        lacking = [node for node, answer in found.items() if not answer["image_id"]]
        pulling = list(found) if self._settings.pull == "always" else lacking
        if self._settings.pull == "never":
            self._require_none(lacking)
            return found
        requests = {node: PULL_IMAGE(self._request(node, self._settings.image)) for node in pulling}
        pulled = self._ask("image: pull", requests, commands.PULLS_AT_ONCE)
        return {**found, **pulled.all()}

    def _require_none(self, lacking: Sequence[int]) -> None:
        fix = 'load it there, or set pull = "missing"'
        what = f"the image {self._settings.image} is not on this node"
        raise_all([PreflightError(what, fix, self._fleet.name(node)) for node in lacking])

    # -- this machine sends it --

    def _from_laptop(self) -> Images:
        settings = self._settings
        local = saved_images.find(settings.runtime, settings.image)
        if settings.pull == "always" and not commands.is_file(settings.image) or not local.id:
            local = self._pull_here(local)
        if commands.is_file(settings.image):
            saved = self._save(local, commands.COPY_FILE)
            return self._send(saved, self._facts, self._facts)
        found = dict(self._inspect(local.id))
        lacking = [node for node, answer in found.items() if answer["image_id"] != local.id]
        if not lacking:
            return found
        kind = commands.kind_of_copy([local.runtime, *(found[node]["runtime"] for node in lacking)])
        if kind == commands.COPY_FILE:
            nodes = [self._fleet.name(node) for node in lacking if found[node]["runtime"] == "apptainer"]
            what = f"{', '.join(nodes)}: apptainer cannot load an image of {local.runtime}"
            raise ConfigError(what, "apptainer build FILE.sif IMAGE, and give the path of that file as the image")
        saved = self._save(local, kind)
        if saved.id != local.id:  # the form of the archive has another one
            again = self._inspect(saved.id, lacking)
            found.update(again)
            lacking = [node for node in lacking if not again[node]["image_id"]]
        facts = {node: self._facts[node] for node in lacking}
        return {**found, **(self._send(saved, facts, facts) if lacking else {})}

    def _pull_here(self, local: LocalImage) -> LocalImage:
        if self._settings.pull == "never":
            what = f"the image {self._settings.image} is not on this machine"
            raise NotFound(what, 'build or load it here, or set pull = "missing" or IMAGE_FROM = "registry"')
        self._caller.note(f"image: pulling {self._settings.image} to this machine")
        return saved_images.pull(local, self._caller.check)

    def _save(self, local: LocalImage, kind: str) -> SavedImage:
        self._caller.note(f"image: {local.name}, {human_bytes(local.bytes)} on this machine")
        return saved_images.save(local, kind, self._caller.check)

    def _send(self, saved: SavedImage, facts: ByNode, loading: ByNode) -> Images:
        """Dispatch the files to the nodes, and load them there."""
        workspace = saved.workspace
        self._require_room(workspace.size * (1 + (saved.kind == commands.COPY_DIR)), facts)
        shares = portions(workspace, self._fleet.cluster, facts, None)
        self._caller.note(f"image: sending {human_bytes(workspace.size)} to {count(len(facts), 'node')}")
        sent = send(self._caller, self._fleet, workspace, shares, facts)
        raise_all(list(sent.failed.values()))
        return self._load(loading, workspace.release, saved.kind, saved.id, saved.bytes)

    def _require_room(self, size: int, facts: ByNode) -> None:
        """The files, and where podman loads them a copy for it. Nodes that have the release need no more than the copy."""
        low = {node: fact.disk_free for node, fact in facts.items() if 0 <= fact.disk_free < size}
        fix = "make room, or choose another ROOT_DIR"
        text = f"the files of the image need {human_bytes(size)} in ROOT_DIR, and {{}} are free"
        raise_all(
            [DispatchError(text.format(human_bytes(free)), fix, self._fleet.name(node)) for node, free in low.items()]
        )

    def _load(self, facts: ByNode, release: str, kind: str, id: str, size: int) -> Images:
        order = {"release": release, "kind": kind, "image_id": id, "bytes": size}
        requests = {
            node: LOAD_IMAGE({**self._request(node, self._settings.image), **order})  # type: ignore[typeddict-item]
            for node in facts
        }
        loaded = self._ask("image: load", requests).all()
        expected = release if kind == commands.COPY_FILE else id
        wrong = {node: answer["image_id"] for node, answer in loaded.items() if answer["image_id"] != expected}
        text = f"the image has the id {{!r}} there after it was loaded, and {expected!r} here"
        raise_all([DispatchError(text.format(has), "", self._fleet.name(node)) for node, has in wrong.items()])
        return loaded

    # -- requests --

    def _request(self, node: int, image: str) -> ImageRequest:
        """The runtime is the one that the node has chosen; a node that was not asked chooses it now."""
        known = self._facts[node].container
        return {"runtime": known.runtime if known and known.runtime else self._settings.runtime, "image": image}

    def _inspect(self, image: str, nodes: Sequence[int] | None = None) -> Images:
        asked = self._facts if nodes is None else nodes
        return self._fleet.ask({node: INSPECT_IMAGE(self._request(node, image)) for node in asked}).all()

    def _ask(
        self, phase: str, requests: Mapping[int, Request[ImageAnswer]], width: int | None = None
    ) -> Gathered[ImageAnswer]:
        """The answers, with progress. width: how many at a time; None: all."""
        if not requests:
            return Gathered()
        fleet, caller = self._fleet, self._caller
        with caller.working(phase, [fleet.name(node) for node in requests]) as view:

            def do(node: int) -> ImageAnswer:
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
