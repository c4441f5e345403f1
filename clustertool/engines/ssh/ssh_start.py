"""This module starts a job over ssh: it checks the nodes, plans, sends the workspace, and starts the processes."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

from clustertool.engines import earlier_work, preflight
from clustertool.engines.base import Engine, Starter, Submission, Submitted
from clustertool.engines.caller import pause, report_nothing_left
from clustertool.engines.elastic import elastic_plan
from clustertool.engines.elastic.elastic_members import (
    HostMember,
    MemberStart,
    build_members,
    join_file,
    join_file_of_member,
)
from clustertool.engines.image_distribution import ImageDistribution
from clustertool.engines.job_request import Kinds, RunRequest, check_ranks, make_plan, start_with_retries
from clustertool.engines.preflight import Examined
from clustertool.engines.send_workspace import disk_needs, portions, send_as_found
from clustertool.engines.ssh.one_command import OneCommand
from clustertool.errors import ClustertoolError, DeviceInUse, PortInUse, PreflightError, only, raise_all, singles
from clustertool.fleet import job_places, node_bundle, shared_roots, stack_tools
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.fleet.fleet import Answers, Fleet, carry_out, devices_of, module_request
from clustertool.fleet.identity import identity, job_id
from clustertool.model.checks.container_findings import different_images
from clustertool.model.container.container_settings import NO_CONTAINER, ContainerSettings
from clustertool.model.dispatch.portions import Portions
from clustertool.model.facts import ByNode, ContainerFacts, Identity, read_facts
from clustertool.model.job.stop_result import StopResult, read_result, read_undo
from clustertool.model.planning import requests
from clustertool.model.planning.devices import with_devices
from clustertool.model.planning.plan import Plan, given_facts, needs_probe, with_containers
from clustertool.model.quantities import count
from clustertool.model.roles import role_name
from clustertool.model.wire.agent_requests import ProbeWanted
from clustertool.show.job_text import show_results

_PAUSE = (1.0, 2.0)  # seconds between two checks of devices that others use
Undone = dict[int, StopResult]  # by node


class SshStart(Starter):
    """The start of a job over ssh. prepare() opens the engine's fleet, unless --dry needs no fact of the nodes."""

    def __init__(self, engine: Engine, request: RunRequest) -> None:
        super().__init__(engine, request)
        self._command = OneCommand(request)
        self._brought: dict[int, ContainerFacts] = {}  # by node: the image that submit() has brought there
        self._members: tuple[HostMember, ...] = ()  # of an elastic job: all hosts that take part, or may

    @property
    def _fleet(self) -> Fleet:
        return self._engine.fleet

    def prepare(self) -> Submission:
        """Examine the nodes, complete the request, and make the plan.

        --dry changes nothing, and asks no node if no fact is needed, without --skip-bad. With --wait it waits until the devices
        are free. Raises the errors of all nodes together, those of the plan, and UsageError for what no elastic job can have.
        """
        request = self._request
        wish, spec = request.wish, request.spec
        if request.elastic.present:
            elastic_plan.refuse_unfit(request)
        if wish.dry and spec is not None and not wish.skip_bad and not needs_probe(request.cluster, spec):
            return self._build_submission(self._make_plan(given_facts(request.cluster)))
        facts = self._examine()
        if wish.dry:
            return self._build_submission(self._make_plan(facts))
        facts = shared_roots.confirm_root_ids(self._fleet, facts)
        if self._request.elastic.present:
            self._members = build_members(request.cluster, facts, request)
        return self._build_submission(self._plan_when_free(facts))

    def submit(self, submission: Submission) -> Submitted:
        """Bring image and workspace to the nodes, and start the plan; make it again if another job took a port or device of it.

        For an elastic job start a process on each node, which makes the plans. Returns the job's id with the plan that was
        started, without one for an elastic job. Raises UsageError if the same command starts from another node.
        """
        assert submission.plan is not None
        made = submission.plan
        if self._request.options.hang_timeout or self._request.cluster.hang_timeout is not None:
            stack_tools.send_early(self._fleet)
        if self._request.elastic.present:
            self._start_members(made)
            return Submitted(made.job_id)
        made = self._bring_image(made, _facts(made))
        releases = self._dispatch(_facts(made))
        self._send_nvml(_with_cards(made))
        self._command.claim_start(self._fleet)
        made = self._start(made, releases)
        self._remember(made)
        return Submitted(made.job_id, made)

    def _make_plan(self, facts: ByNode, identity: Identity | None = None) -> Plan:
        """Plan the request; an elastic job for the first MAX of the hosts, COORDINATOR first (elastic_plan.first_hosts)."""
        request, elastic = self._request, self._request.elastic
        if not elastic.present:
            return make_plan(request, facts, identity)
        first = elastic_plan.first_hosts(request.cluster, elastic)
        number = {host.name: host.index for host in request.cluster.hosts}
        known = {host.index: replace(facts[number[host.name]], node=host.index) for host in first.hosts}
        return make_plan(replace(request, cluster=first), known, identity)

    def _build_submission(self, made: Plan) -> Submission:
        """Build the submission of a plan; for an elastic job with the sentence that states for which nodes the plan is."""
        stands = elastic_plan.describe_plan(made, self._request.cluster) if self._request.elastic.present else ""
        return Submission(made.job_id, made, stands=stands)

    def _remember(self, made: Plan) -> None:
        """Record the job and all hosts of the fleet on this machine, for later commands without a conf.py.

        Prints a warning if that fails.
        """
        cluster = replace(made.cluster, hosts=self._fleet.cluster.hosts)
        job_places.remember(made.identity, cluster, self._engine.caller.warn)

    def _start_members(self, made: Plan) -> None:
        """Send image, workspace and NVML to all hosts, and start a process on each that joins the job.

        Wait for the first epoch, and record the job on this machine.
        """
        caller, request = self._engine.caller, self._request
        facts = {member.host.index: member.facts for member in self._members}
        made = self._bring_image(made, facts)
        releases = self._dispatch(facts)
        self._send_nvml({node: fact for node, fact in facts.items() if fact.devices and fact.device_kind == "gpu"})
        total, elastic = len(self._members), self._request.elastic
        caller.note(f"job {made.job_id}: {made.job.mode}, elastic, {elastic.text} nodes, on {count(total, 'node')}")
        common = join_file(request, made, releases.get(0, ""), total)
        files = {
            one.host.index: join_file_of_member(common, request.cluster, one, one.host.index) for one in self._members
        }
        self._command.claim_start(self._fleet)
        MemberStart(caller, self._fleet, files, elastic.minimum).run()
        self._remember(made)

    def _examine(self) -> ByNode:
        """Probe and check all nodes, print the warnings, and return their facts; raise the errors of all nodes together.

        With --devices auto the facts have the use of devices. Leaves out bad nodes with --skip-bad, and for an elastic job.
        Completes the request: the spec if job.toml is on the nodes, the job id, the job to resume. Announces the command to the
        first node, except with --dry.
        """
        caller, request = self._engine.caller, self._request
        options = request.options
        listing = not (options.command or options.script) or bool(options.shards)  # else only job.toml could need it
        wanted: ProbeWanted = {"job_workspace": options.job_workspace, "listing": listing}
        wanted["earlier"] = earlier_work.earlier_wanted(request)
        container = request.spec.container if request.spec else NO_CONTAINER
        asked = self._add_mpi_question(wanted)
        examined = self._check_room(preflight.examine(self._fleet, asked, ports=False, container=container))
        elastic = self._request.elastic
        if request.wish.skip_bad or elastic.present:
            if elastic.present:
                examined = self._keep_elastic_hosts(examined)
            else:
                examined = self._keep_hosts(examined.leave_out_bad(caller, int(options.nnodes or 0)))
            examined = self._check_room(examined)  # fewer trainers read more shards each
        facts = examined.facts
        examined.require()
        examined.warn(caller)
        if request.spec is None:
            request.read_toml(caller, facts[0].job_toml, {})
            assert request.spec is not None
            if request.spec.elastic.present:
                elastic_plan.refuse_unfit(request)
                facts = self._keep_elastic_hosts(examined).facts
            if request.spec.by_mpirun or request.spec.container:  # that was not known when the nodes were asked
                facts = self._examine_job(wanted, request.spec.container)
        if not request.wish.dry:
            self._command.announce(self._fleet, facts)
        earlier_work.choose_id_and_resumed(caller, request, facts)
        return self._add_device_use(facts)

    def _keep_elastic_hosts(self, examined: Examined) -> Examined:
        """Reduce request and fleet to the hosts without errors, COORDINATOR first, and return their part of `examined`.

        Prints a warning for each other host. Raises the errors of all nodes if fewer than the minimum are left, or COORDINATOR
        is not.
        """
        elastic = self._request.elastic
        left = examined.leave_out_bad(self._engine.caller, least=elastic.minimum, first=elastic.coordinator)
        return self._keep_hosts(left)

    def _keep_hosts(self, examined: Examined) -> Examined:
        """Reduce the cluster of request and fleet to the hosts of `examined`, with their numbers, and return `examined`."""
        self._request.cluster = examined.cluster
        self._fleet.keep_hosts(examined.cluster)
        return examined

    def _add_mpi_question(self, wanted: ProbeWanted) -> preflight.Wanted:
        """Return `wanted`; for a job that mpirun starts: a function that returns it for a host, with the question for MPI."""
        spec, cluster, passed = self._request.spec, self._request.cluster, dict(self._request.passed)
        if spec is None or not spec.by_mpirun:
            return wanted
        variables = {**passed, **dict(spec.env)}
        return lambda host: {**wanted, **preflight.for_mpi(cluster, host, variables)}

    def _examine_job(self, wanted: ProbeWanted, container: ContainerSettings) -> ByNode:
        """Probe all nodes again, now with the question for MPI or the container runtime; return the facts.

        Raises the errors of all nodes.
        """
        asked = self._add_mpi_question(wanted)
        examined = preflight.examine(self._fleet, asked, ports=False, ping=False, container=container)
        examined.require()
        return examined.facts

    def _examine_again(self) -> ByNode:
        """Probe all nodes again without the checks, before another plan, and return the facts.

        Raises the errors of all nodes.
        """
        again: ProbeWanted = {"job_workspace": self._request.options.job_workspace}
        container = self._request.spec.container if self._request.spec else NO_CONTAINER
        gathered = preflight.probe(self._fleet, self._add_mpi_question(again), container)
        facts = {node: read_facts(node, answer) for node, answer in gathered.all().items()}
        return self._add_device_use(shared_roots.confirm_root_ids(self._fleet, facts))

    def _add_device_use(self, facts: ByNode) -> ByNode:
        """Return the facts with the use and state of devices, which the nodes are asked for with --devices auto.

        Without it, return the facts as they are. Raises the errors of all nodes.
        """
        spec = self._request.spec
        if spec is None or not spec.auto_devices:
            return facts
        answers = devices_of(self._fleet).all()
        return {node: with_devices(fact, answers[node]) for node, fact in facts.items()}

    def _check_room(self, examined: Examined) -> Examined:
        """Return `examined` with findings on whether each node's disk has room for the workspace, in place of earlier ones.

        Return it as it is without a workspace, or if the check "disk" is off.
        """
        request = self._request
        if request.workspace is None:
            return examined
        return examined.check_disk(disk_needs(request.workspace, request.cluster, examined.facts, request.spec))

    def _plan(self, facts: ByNode) -> Plan:
        """Plan the job with a new identity, print its warnings and a hint about earlier jobs, and call request.planned().

        The identity has the id of the request, or a new one. Raises UsageError for a rank of --rank that the plan does not
        have, and the errors of the plan.
        """
        caller, request, wish = self._engine.caller, self._request, self._request.wish
        mine = identity(request.job_id or job_id(), wish.job_id, wish.name or wish.job_id, request.origin)
        if self._command.starter:
            mine = replace(mine, starter=self._command.starter, same_command=self._command.digest)
        made = self._make_plan(facts, mine)
        check_ranks(request, made)
        earlier_work.hint_at_resuming(caller, request, made)
        for warning in made.warnings:
            caller.warn(warning)
        request.planned(made)
        return made

    def _plan_when_free(self, facts: ByNode) -> Plan:
        """Plan the job as _plan() does; with --wait, wait until its devices are free.

        The wait prints once which devices are in use, and probes all nodes every 1 to 2 s. Raises Interrupted, and the errors
        of the plan and of the nodes; for devices in use only without --wait.
        """
        caller, waiting = self._engine.caller, False
        while True:
            try:
                return self._plan(facts)
            except ClustertoolError as error:
                if not self._request.wish.wait or not only(error, DeviceInUse):
                    raise
                if not waiting:
                    waiting = True
                    busy = "; ".join(f"{one.node}: {one.what}" if one.node else one.what for one in singles(error))
                    caller.note(f"waiting for devices: {busy}; Ctrl+C ends the waiting")
            # Random, so that two jobs that wait for each other's devices do not continue to do so.
            pause(caller, random.uniform(*_PAUSE))
            facts = self._examine_again()

    def _dispatch(self, facts: ByNode) -> Mapping[int, str]:
        """Send the workspace to the nodes of `facts`, and return {node: the name of its release}; {} without a workspace.

        If a file changes meanwhile, the request gets the workspace as it was read again. Raises the errors of all nodes
        together.
        """
        request = self._request
        if request.workspace is None:
            return {}

        def shares_of(workspace: Workspace) -> Portions:
            return portions(workspace, request.cluster, facts, request.spec)

        caller = self._engine.caller
        sent, request.workspace = send_as_found(caller, self._fleet, request.workspace, shares_of, facts)
        raise_all(list(sent.failed.values()))
        shares = shares_of(request.workspace)
        return {node: portion.release for node, portion in shares.items()}

    def _bring_image(self, made: Plan, facts: ByNode) -> Plan:
        """Bring the image of a job in containers to the nodes of `facts`; return the plan with the image that each node has.

        Without containers, return the plan as it is. Raises PreflightErrors if the images differ between nodes.
        """
        spec = self._request.spec
        if spec is None or not spec.container:
            return made
        self._brought = ImageDistribution(self._engine.caller, self._fleet, spec.container, facts).run()
        names = {node: self._fleet.name(node) for node in self._brought}
        wrong = different_images(self._brought, names)
        raise_all([PreflightError(one.text, one.fix, names[node]) for node, one in wrong.items()])
        return self._with_image(made)

    def _with_image(self, made: Plan) -> Plan:
        """Return the plan with the image that was brought to each node, and pull = "missing"; as it is if none was brought."""
        if not self._brought:
            return made
        facts = {node: replace(fact, container=self._brought[node]) for node, fact in _facts(made).items()}
        job = replace(made.job, container=replace(made.job.container, pull="missing"))
        return with_containers(replace(made, job=job), facts)

    def _send_nvml(self, facts: ByNode) -> None:
        """Send the NVML module, which records what cards do, to the nodes of `facts` that lack it. Errors are ignored."""
        if facts:
            lacking = [node for node, fact in facts.items() if node_bundle.nvml()[0] not in fact.modules]
            self._fleet.ask(dict.fromkeys(lacking, module_request()))

    def _start(self, made: Plan, releases: Mapping[int, str]) -> Plan:
        """Start a plan, made again if another job took a port, or a device that may be another one; return the started plan.

        After an error: print what is left on which nodes, report to the caller if nothing is, and raise the error.
        """
        caller, request = self._engine.caller, self._request
        roles = [process.role for process in made.processes]
        counts = ", ".join(count(roles.count(role), role_name(role)) for role in made.job.roles)
        caller.note(f"job {made.job_id}: {made.job.mode}, {counts} on {count(len(made.nodes), 'node')}")
        undone: Undone | None = None
        # Other ports can always be taken, other devices with --devices auto, and the same ones later with --wait.
        any_device = request.wish.wait or request.options.devices.strip() == "auto"
        passing: Kinds = (PortInUse, DeviceInUse) if any_device else (PortInUse,)

        def start(made: Plan) -> None:
            nonlocal undone
            undone = {}
            caller.starting(made.job_id)
            self._carry_out(made, releases, undone)

        def plan_again(error: ClustertoolError) -> Plan:
            nonlocal releases, undone
            undone = None
            what = "a device" if only(error, DeviceInUse) else "a port"
            caller.note(f"{what} was taken by another job a moment ago: planning again")
            request.job_id = made.job_id
            later = self._with_image(self._plan_when_free(self._examine_again()))
            if only(error, DeviceInUse):  # other devices may be other trainers, which read other shards
                releases = self._dispatch(_facts(later))
            return later

        try:
            return start_with_retries(caller, made, start, plan_again, passing)
        except ClustertoolError as error:
            results = {}
            if undone is not None:
                results = {node: undone.get(node, read_result(None, "")) for node in range(len(made.nodes))}
                show_results({self._fleet.name(node): result for node, result in results.items()}, caller.note)
            if all(result.over and not result.waits for result in results.values()):
                report_nothing_left(caller, error)
            raise

    def _carry_out(self, made: Plan, releases: Mapping[int, str], undone: Undone) -> None:
        """Send the requests that start the plan, and put the result of undoing a failed start into `undone`, by node."""
        request = self._request

        def note(phase: str, answers: Answers) -> None:
            for node, answer in answers.items():
                if phase == "stop" or node not in undone or isinstance(answer, ClustertoolError):
                    undone[node] = read_result(answer, made.job_id) if phase == "stop" else read_undo(answer)

        carry_out(requests.start(made, releases, request.secrets, request.resumed), self._fleet, note)


def _with_cards(made: Plan) -> ByNode:
    """Return the facts of the nodes whose GPUs the job uses."""
    used = {process.node for process in made.processes if process.devices}
    facts = _facts(made)
    return {node: facts[node] for node in used if facts[node].devices and made.nodes[node].device_kind == "gpu"}


def _facts(made: Plan) -> ByNode:
    """Return the facts of the plan's nodes, by node."""
    return {node.host.index: node.facts for node in made.nodes}
