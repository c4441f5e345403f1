"""A cluster is an object that runs jobs and finds them."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from clustertool.actions import load_config
from clustertool.actions.conf_file import Selection
from clustertool.actions.find_jobs import ask_and_choose, ask_engine, ask_jobs, merge_answers, warn_of_remains
from clustertool.actions.follow_job import Inbox, JobFollower, count_started
from clustertool.actions.read_request import read_request
from clustertool.actions.stop_jobs import stop_how
from clustertool.api.job_object import Job
from clustertool.api.plain_text import plain_errors
from clustertool.api.silent_caller import Listener, SilentCaller, listener
from clustertool.cli.launchers.nested_launcher import Inner, effect_text, find_separating_launcher
from clustertool.engines.base import Submitted, starter_of
from clustertool.engines.job_request import RunWish, no_advice
from clustertool.errors import ClustertoolError, ConfigError, UsageError, raise_all
from clustertool.fleet.embedded_cluster import LocalCluster
from clustertool.fleet.fleet import Fleet
from clustertool.model.config.cluster import Cluster as ClusterConfig
from clustertool.model.config.job import Options
from clustertool.model.job.job_names import FRESH, NEWEST
from clustertool.model.job.state import JobStatus
from clustertool.model.planning.plan import Plan
from clustertool.model.quantities import count

Path = str | os.PathLike[str]
# Options of the command line: keywords with other names, with lists as values, and those that are no keywords.
_KEYWORD_NAMES = {
    **dict.fromkeys(("gpus", "xpus", "npus"), "devices"),
    "trainers": "workers",
    "trainer_num": "worker_num",
}
_KEYWORD_LISTS = ("servers", "workers", "heter_workers")
_NO_KEYWORDS = ("rank", "all_ranks")


class Cluster:
    """The nodes of a conf.py. Make it with from_conf() or local().

    The object has no connection: each method opens connections of its own. It can be used from several threads, and a program
    can have several clusters.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self._config = config

    @classmethod
    @plain_errors()
    def from_conf(
        cls,
        conf: Path = "",
        *,
        hostfile: Path = "",
        only: Sequence[str] = (),
        skip: Sequence[str] = (),
        engine: str = "",
        no_conf: bool = False,
    ) -> Cluster:
        """Build the cluster of `conf`, else of the nearest conf.py in the current folder or above; open no connection.

        Where none names the nodes: the hosts of the embedded local cluster, if it runs, and after them this machine, if
        clusterrun has started jobs in the current folder or above. hostfile, only, skip, engine, no_conf: as the options of the
        command line. Raises UsageError; ConfigError, also if there are no such nodes.
        """
        chosen = _require_list("only", only), _require_list("skip", skip)
        selection = Selection(os.fspath(conf), os.fspath(hostfile), *chosen, engine=engine, no_conf=no_conf)
        return cls(load_config.cluster(SilentCaller(), selection, start_local=False))

    @classmethod
    @plain_errors()
    def local(cls, nodes: int | None = None) -> Cluster:
        """Return the embedded local cluster, started if it does not run. nodes: how many (default: as many as it has, or 3).

        `clustertool cluster.down` ends it. Raises PreflightError, for example where there is no sshd.
        """
        return cls(LocalCluster().up(nodes))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the nodes."""
        return tuple(host.name for host in self._config.hosts)

    def __repr__(self) -> str:
        return f"Cluster({self._config.where!r}, {count(len(self.hosts), 'node')})"

    @plain_errors()
    def run(
        self,
        job: Path = "",
        *,
        script: str = "",
        command: Sequence[str] = (),
        job_workspace: str = "",
        mode: str = "",
        nproc_per_node: int | str | None = None,
        devices: str | Iterable[int] | None = None,
        nnodes: int | str | None = None,
        servers: Sequence[str] = (),
        workers: Sequence[str] = (),
        heter_workers: Sequence[str] = (),
        heter_devices: str = "",
        server_num: int | None = None,
        worker_num: int | None = None,
        heter_worker_num: int | str | None = None,
        http_port: int | None = None,
        master_port: int | None = None,
        env: Mapping[str, object] | None = None,
        force_env: bool = False,
        shards: str | Sequence[str] = (),
        only_where_read: bool = False,
        timeout: float | str | None = None,
        grace: float | str | None = None,
        on_failure: str = "",
        max_restarts: int | None = None,
        hang_timeout: float | str | None = None,
        on_hang: str = "",
        lease: float | str | None = None,
        image: str | None = None,
        elastic_timeout: float | str | None = None,
        elastic_server: str | Sequence[str] = (),
        nested: bool = False,
        job_id: str = "",
        name: str = "",
        resume: bool | str | Job = "",
        keep: str | Sequence[str] = (),
        skip_bad: bool = False,
        wait: bool = False,
        settings: Mapping[str, object] | None = None,
        progress: Listener | None = None,
    ) -> Job:
        """Check the nodes, send the workspace, start the job, and return when all its processes have started.

        With an engine that has a queue: submit the job, and return.

        job: the workspace, a folder of this machine. job_workspace: instead of it, a folder that every node has.
        command: instead of script, a list of arguments. resume: the job whose output this one continues (a Job, its id or its
        name), True for the newest of the same name or workspace, False for none even if job.toml has `resume = true`.
        keep: files and folders of that job besides its output which are copied, too.
        lease: seconds after which the job ends when no wait() and no command follows it. image: of the container of each
        process; "" for no container, None for what job.toml or conf.py has. nested: a launcher such as torchrun in the
        command is intended, one on each node; else it is an error: each trainer would begin its own training. settings: of the
        engine, as in its dict of conf.py and with priority over it. progress: is called with Progress values; without it, a
        notebook shows a bar. nnodes: a text such as "2:4" for an elastic job. force_env: `env` may replace ranks and addresses.
        only_where_read: send each shard only to the node whose trainer reads it. skip_bad: go on without the nodes that fail
        the checks. These three and the others are the options of `clustertool run`, and override job.toml.

        The job does not need this program any more: it goes on when the program ends. If it fails at once, wait() raises
        that. An exception such as KeyboardInterrupt in this call ends what it has started on the nodes.

        Raises UsageError, DataError, ConfigError before any connection; PreflightError, AuthError, DispatchError or Several
        of them for what is wrong on nodes. Nothing runs then.
        """
        if not job and not job_workspace:
            fix = 'a folder: run("./job"), or one that every node has: job_workspace="/srv/job"'
            raise UsageError("run() needs a job", fix)
        if isinstance(shards, str):
            shards = (shards,) if shards else ()
        options = Options(
            script=script,
            command=_require_list("command", command),
            job_workspace=job_workspace,
            mode=mode,
            nproc_per_node=_option_text(nproc_per_node),
            devices=_devices_text(devices),
            nnodes=_option_text(nnodes),
            servers=_require_list("servers", servers),
            workers=_require_list("workers", workers),
            heter_workers=_require_list("heter_workers", heter_workers),
            heter_devices=heter_devices,
            server_num=_option_text(server_num),
            worker_num=_option_text(worker_num),
            heter_worker_num=_option_text(heter_worker_num),
            http_port=_option_text(http_port),
            master_port=_option_text(master_port),
            env=tuple(f"{name}={value}" for name, value in (env or {}).items()),
            force_env=force_env,
            shards=tuple(shards),
            only_where_read=only_where_read,
            timeout=_option_text(timeout),
            grace=_option_text(grace),
            on_failure=on_failure,
            max_restarts=_option_text(max_restarts),
            hang_timeout=_option_text(hang_timeout),
            on_hang=on_hang,
            lease=_option_text(lease),
            image=image,
            elastic_timeout=_option_text(elastic_timeout),
            elastic_server=(elastic_server,) if isinstance(elastic_server, str) else tuple(elastic_server),
            nested=nested,
        )
        wish = RunWish(
            os.fspath(job),
            job_id,
            name,
            _job_to_resume(resume),
            (keep,) if isinstance(keep, str) else tuple(keep),
            skip_bad=skip_bad,
            wait=wait,
            shown=[],
            settings=dict(settings or {}),
        )
        caller, inbox = SilentCaller(listener(progress)), Inbox()
        advise = no_advice if nested else functools.partial(refuse_nested, folder=os.fspath(job))
        request = read_request(caller, options, wish, self._without_this_machine, advise)
        caller.progress("check", text=f"checking {count(len(request.cluster.hosts), 'node')}")
        with closing(inbox), caller.engine(request.cluster, inbox.put) as engine:
            starter = starter_of(engine, request)
            submission = starter.prepare()
            assert request.spec is not None  # prepare() completes it
            submitted: Submitted | None = None
            try:
                submitted = starter.submit(submission)
                if submitted.plan is not None:
                    _until_started(caller, engine.fleet, inbox, submitted.plan)
            except BaseException as error:
                failed = submitted is None and isinstance(error, ClustertoolError)  # submit() has undone all of it
                if caller.job and not failed:
                    engine.cancel(caller.job, stop_how("Cluster.run()", request.spec.policy.grace))
                raise
        return Job(request.cluster, submitted.job_id)

    def _without_this_machine(self) -> ClusterConfig:
        """Return the configuration without the hosts that are this machine, since only clusterrun starts jobs there.

        Raises ConfigError if no other host is left. The configuration of an engine that chooses the nodes is returned as it is.
        """
        if not load_config.needs_hosts(self._config):
            return self._config
        hosts = [host for host in self._config.hosts if not host.here]
        if not hosts:
            fix = "write conf.py (see conf.py.example), or start one with Cluster.local()"
            raise ConfigError("there is no conf.py here or above, and the embedded local cluster does not run", fix)
        numbered = (replace(host, index=index) for index, host in enumerate(hosts))
        return replace(self._config, hosts=tuple(numbered))

    @plain_errors()
    def job(self, id: str = "") -> Job:
        """Ask the nodes and return the job with this id, name or unique beginning of an id; with "" the newest one.

        Raises UsageError if several match; for none NotFound, or the errors of nodes that did not answer.
        """
        with SilentCaller().opened(self._config) as engine:
            return Job(self._config, ask_and_choose(engine, id)["id"])

    @plain_errors()
    def jobs(self) -> list[Job]:
        """Return all jobs of this user, newest first: those with records on nodes that answer, and those that the engine knows.

        Of the latter, those that are queued or run, and those of which it knows why they have ended. Logged as warnings: nodes
        that do not answer, an engine that does not, and processes that are left of jobs. If no node answers, their errors are
        raised.
        """
        caller = SilentCaller()
        with caller.opened(self._config) as engine:
            fleet = engine.fleet
            answers = ask_jobs(fleet, "")
            if not answers:
                raise_all(list(fleet.failed.values()))
            for error in fleet.failed.values():
                caller.warn(str(error))
            warn_of_remains(engine, answers)
            return [Job(self._config, job["id"]) for job in merge_answers(answers, ask_engine(engine, answers, ""))]


def _option_text(value: object) -> str:
    """Convert a parameter to the text of the command line's option, None to "" (not given)."""
    return "" if value is None else str(value)


def _require_list(name: str, value: Iterable[str]) -> tuple[str, ...]:
    """Return a list of texts as a tuple. Raises UsageError for a text: it would count as the list of its characters.

    name: of the parameter, for the error.
    """
    if isinstance(value, str):
        raise UsageError(f"{name} is the text {value!r}", f"give a list: {name}={value.split()!r}")
    return tuple(value)


def _devices_text(value: str | Iterable[int] | None) -> str:
    """Convert the parameter `devices` to the text of --devices: numbers with commas, a text as it is, "" for None.

    Raises UsageError for an empty list.
    """
    if value is None or isinstance(value, str):
        return _option_text(value)
    listed = ",".join(map(str, value))
    if not listed:
        raise UsageError("devices is an empty list", "name devices, leave it out for all of them")
    return listed


def _job_to_resume(value: bool | str | Job) -> str:
    """Convert the parameter `resume` to the text of RunWish: a job's id or name, NEWEST for True, FRESH for False."""
    if isinstance(value, bool):
        return NEWEST if value else FRESH
    return value.id if isinstance(value, Job) else value


def _until_started(caller: SilentCaller, fleet: Fleet, inbox: Inbox, made: Plan) -> None:
    """Follow a job, with progress and news, until all processes of its plan have started or the job has ended."""
    follower, total = JobFollower(fleet, inbox, made.job_id), len(made.processes)
    follower.watch.status.plan = made.ranks
    follower.start({"logs": []})

    def report(status: JobStatus) -> bool:
        begun = count_started(status)
        caller.progress("start", begun, total, f"job {made.job_id}: {begun} of {count(total, 'rank')} started")
        return status.outcome is not None or begun >= total

    for item in follower.items(caller.check, report):
        caller.log(item)


# -- a launcher in the command -----------------------------------------------------------------------------------------


def refuse_nested(made: Plan, folder: str = "") -> str:
    """Raise UsageError if each trainer of a plan would start a launcher, and so a training of its own; else return "".

    The command line only warns of it, but a program does not see warnings, and such a job succeeds. folder: the workspace.
    """
    inner = find_separating_launcher(made, folder)
    if inner is None:
        return ""
    fix = f"start the program itself: {_keywords(inner)}; or give nested=True if they are intended"
    raise UsageError(effect_text(inner, made), fix)


def _keywords(inner: Inner) -> str:
    """Write the keywords of Cluster.run() that start the launcher's program in one training, as in Python code.

    If the program is not known: which keywords are needed, in words.
    """
    if not inner.program:
        return f"script without {inner.shown}, and nproc_per_node"
    found: dict[str, object] = {"script": shlex.join(inner.program)}
    env: dict[str, str] = {}
    for option, value in inner.options:
        key = option[2:].replace("-", "_")
        key = _KEYWORD_NAMES.get(key, key)
        if key == "env":
            name, _, text = value.partition("=")
            env[name] = text
        elif key not in _NO_KEYWORDS:
            found[key] = [value] if key in _KEYWORD_LISTS else int(value) if value.isdecimal() else value or True
    if env:
        found["env"] = env
    return ", ".join(f"{key}={value!r}" for key, value in found.items())
