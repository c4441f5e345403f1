"""inv dispatch copies a workspace to the nodes, and prints bytes, seconds and nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from clustertool.actions import load_config, load_workspace
from clustertool.engines import preflight
from clustertool.engines.image_distribution import ImageDistribution
from clustertool.engines.send_workspace import disk_needs, portions, send_as_found
from clustertool.errors import UsageError, as_one, raise_all
from clustertool.fleet import shared_roots
from clustertool.fleet.dispatch.deliver import Dispatched
from clustertool.fleet.dispatch.receivers import owners
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.fleet.fleet import Fleet
from clustertool.model.config.cluster import Cluster
from clustertool.model.container.container_settings import NO_CONTAINER, ContainerSettings
from clustertool.model.dispatch.portions import Portions
from clustertool.model.facts import ByNode, Facts
from clustertool.model.hints import PROGRAM
from clustertool.model.planning.plan import given_facts
from clustertool.model.quantities import count, human_bytes
from clustertool.model.wire.agent_answers import VerifyAnswer
from clustertool.model.wire.messages import VERIFY
from clustertool.show.error_text import exit_json
from clustertool.verbs import signals
from clustertool.verbs.verb import Call, User, choose_alias

_FOUND = ("releases", "pieces", "bytes", "damaged", "lost")  # of the answer to --verify


def dispatch(call: Call) -> None:
    """Send a workspace, and the image of its container, to all nodes, and print what was sent; with --dry only print it.

    With --verify the nodes check before that which of their releases are damaged. Raises the errors of nodes.
    """
    folder = choose_alias(call, "workspace", "job-dispatch-package")
    if not folder:
        raise UsageError("dispatch needs a workspace", f"{PROGRAM} dispatch --workspace ./job")
    toml = load_workspace.workspace_toml(Path(folder))
    cluster = load_config.cluster(call, call.selection, start_local=True, of_hosts="dispatch")
    spec = load_workspace.read_scattered_job(cluster, toml)
    workspace = load_workspace.workspace(call, Path(folder), cluster.ignore_from)
    if spec:
        portions(workspace, cluster, given_facts(cluster), spec)  # bad data is an error before any connection
    if call.given.dry:
        _show_plan(call, workspace, cluster, scattered=spec is not None)
        return
    with Fleet(cluster, signals.check, person=User()) as fleet:
        start = time.monotonic()
        settings = load_workspace.container(cluster, toml, None)
        facts = _examine(fleet, lambda facts: disk_needs(workspace, cluster, facts, spec, copies=1), settings)
        facts, found = verify_releases(call, fleet, facts) if call.given.verify else (facts, {})
        call.dispatches = True
        images = ImageDistribution(call, fleet, settings, facts).run() if settings else {}

        def shares_of(found: Workspace) -> Portions:
            return portions(found, cluster, facts, spec)

        done, workspace = send_as_found(call, fleet, workspace, shares_of, facts, start)
        checked = {"verified": found} if call.given.verify else {}
        ids = {fleet.name(node): one.image_id for node, one in sorted(images.items())}
        image = {"images": ids} if settings else {}
        call.answer({"release": workspace.release, **checked, **image, **_as_json(done, fleet)})
        raise_all(list(done.failed.values()))


def _show_plan(call: Call, workspace: Workspace, cluster: Cluster, scattered: bool) -> None:
    """Print what would be sent, for --dry. With --verify the nodes check what they have, and remove nothing.

    scattered: each shard goes only to the nodes that read it.
    """
    amount = f"{count(len(workspace.files), 'file')}, {human_bytes(workspace.size)}"
    shards = ", shards only to the nodes that read them" if scattered else f", as release {workspace.release}"
    call.terminal.line(f"would send {amount}{shards}")
    answer: dict[str, object] = {"release": workspace.release, "files": len(workspace.files), "bytes": workspace.size}
    if call.given.verify:
        with Fleet(cluster, signals.check, person=User()) as fleet:
            answer["verified"] = verify_releases(call, fleet, _examine(fleet))[1]
    call.answer(answer)


def _examine(
    fleet: Fleet, need: Callable[[ByNode], Mapping[int, int]] | None = None, container: ContainerSettings = NO_CONTAINER
) -> dict[int, Facts]:
    """Check the nodes, with their disk space, and return their facts, with the ROOT_DIRs that they share. Raises all errors.

    need: computes the bytes for each node; None: no check of the disk.
    """
    examined = preflight.examine(fleet, {}, ping=False, container=container)
    if need is not None:
        examined = examined.check_disk(need(examined.facts))
    examined.require()
    return shared_roots.confirm_root_ids(fleet, examined.facts)


def _as_json(done: Dispatched, fleet: Fleet) -> dict[str, object]:
    """Build the fields of the JSON answer about a dispatch: bytes, seconds, the nodes by how they got it, and the exit code.

    "bytes" are those sent by this machine, "between" those from node to node. Failed nodes are in "failed", with the reason.
    """
    return {
        "bytes": done.tally.uplink,
        "between": done.tally.between,
        "seconds": round(done.seconds, 3),
        "sent": [fleet.name(node) for node in done.sent],
        "had": [fleet.name(node) for node in done.had],
        "shared": [fleet.name(node) for node in done.shared if node not in done.failed],
        "served": {fleet.name(node): why for node, why in done.tally.served.items()},
        "releases": {fleet.name(node): what for node, what in sorted(done.releases.items()) if node not in done.failed},
        "failed": {fleet.name(node): error.what for node, error in sorted(done.failed.items())},
        "exit": exit_json(as_one(list(done.failed.values())), "tool"),
    }


def verify_releases(
    call: Call, fleet: Fleet, facts: ByNode
) -> tuple[dict[int, Facts], dict[str, Mapping[str, object]]]:
    """Let the nodes check the stored releases, print the results, and return (facts without damaged releases, results by name).

    What is damaged is removed, except with --dry. Nodes that share a ROOT_DIR check it once. Raises the errors of nodes after
    that.
    """
    first = owners(facts)
    gathered = fleet.ask({node: VERIFY({"remove": not call.given.dry}) for node in first.values()})
    answers = dict(sorted(gathered.ok.items()))
    for node, answer in answers.items():
        style = "red" if answer["damaged"] or answer["lost"] else ""
        call.terminal.line(f"{fleet.name(node)}: {_describe_verification(answer, call.given.dry)}", style)
    raise_all(list(gathered.failed.values()))
    sound = {}
    for node, fact in facts.items():
        lost = answers[first[fact.root_id]]["lost"]
        sound[node] = replace(fact, releases=tuple(name for name in fact.releases if name not in lost))
    found: dict[str, Mapping[str, object]] = {
        fleet.name(n): {k: v for k, v in answer.items() if k in _FOUND} for n, answer in answers.items()
    }
    return sound, found


def _describe_verification(answer: VerifyAnswer, dry: bool) -> str:
    """Describe as text how many releases and pieces a node has, and which are damaged. dry: they were not removed."""
    all_ = f"{count(answer['releases'], 'release')} of {count(answer['pieces'], 'piece')}"
    all_ += f", {human_bytes(answer['bytes'])}"
    if not answer["damaged"] and not answer["lost"]:
        return f"{all_}: nothing is damaged"
    bad = f"damaged are {count(answer['damaged'], 'piece')} and {count(len(answer['lost']), 'release')}"
    return f"{all_}: {bad}{', which would be removed' if dry else '; removed'}"
