"""inv stacks takes the stacks of all ranks of a job, and of their child processes, at one moment, and gathers equal ones."""

from __future__ import annotations

import time

from clustertool.actions.find_jobs import attach_to
from clustertool.errors import NotFound, raise_all
from clustertool.fleet import stack_tools
from clustertool.model.config.folded_names import fold, grouped
from clustertool.model.hints import PROGRAM
from clustertool.model.job.stacks import ProcessSample, gather
from clustertool.model.shape import read, to_plain
from clustertool.model.wire.agent_requests import StacksRequest
from clustertool.model.wire.messages import STACK_TOOLS, STACKS
from clustertool.show.stack_view import stack_lines
from clustertool.verbs.fetch import page_path, write_page
from clustertool.verbs.jobs import engine_of
from clustertool.verbs.verb import Call, read_whole_number, role_of
from clustertool.watch.sanitize import harmless

_SECONDS, _NATIVE = 10.0, 30.0  # for the sampler of a node; with --native, whose symbols are read first
_MORE = 20.0  # seconds for the answer of a node beyond that


def stacks(call: Call) -> None:
    """Take the stacks of a job, print equal ones gathered with their ranks, or answer with JSON; --to: all frames in a file.

    Raises UsageError for options that are not valid, NotFound if no such rank runs, and the errors of nodes after the rest.
    """
    given = call.given
    numbers = [read_whole_number(part.strip(), "--rank") for part in given.rank.split(",") if part.strip()]
    role = role_of(given.role or "trainer") if given.role or numbers else ""
    ranks, seconds = ",".join(map(str, numbers)), _NATIVE if given.native else _SECONDS
    to = page_path(given.to) if given.to else None
    with engine_of(call, newest=True) as engine:
        job = attach_to(engine, given.job, running=True)["id"]
        fleet = engine.fleet_of_job(job)
        if fleet is not engine.fleet:
            fleet.open()
        tools, reasons = stack_tools.prepare(fleet, fleet.ask_all(STACK_TOOLS({})))
        how = StacksRequest(job=job, role=role, ranks=ranks, native=given.native, seconds=seconds, tool="")
        began = time.time()
        gathered = fleet.ask({node: STACKS({**how, "tool": tool}) for node, tool in tools.items()}, seconds + _MORE)
        fleet.failed.update(gathered.failed)
        sampled = {n: [read(ProcessSample, one) for one in answer["samples"]] for n, answer in gathered.ok.items()}
        groups = gather(sample for samples in sampled.values() for sample in samples)
        if to is not None:
            write_page(to, "".join(f"{harmless(text)}\n" for text, _ in stack_lines(groups, whole=True)))
        if call.json:
            nodes = {fleet.name(node): to_plain(samples) for node, samples in sampled.items()}
            call.answer({"job": job, "t": began, "groups": to_plain(groups), "nodes": nodes})
        for text, style in () if call.json else stack_lines(groups):
            call.terminal.line(text, style)
        texts = {node: f"no stacks of Python: {why}" for node, why in reasons.items()}
        texts.update((node, answer["fault"]) for node, answer in gathered.ok.items() if answer["fault"])
        for text, names in grouped((text, fleet.name(node)) for node, text in texts.items()).items():
            call.terminal.warn(f"{fold(names)}: {text}")
        raise_all(list(fleet.failed.values()))
        if not groups:
            raise NotFound(f"no such rank of job {job} runs", f"{PROGRAM} status --job {job} shows its ranks")
