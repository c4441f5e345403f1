"""This module computes the command line that starts a rank in a container, and the variables that travel with it.

No value of a variable is on a command line: the client of the runtime has them in its environment, and passes them by name.
Variables that the client itself obeys (HOME, DOCKER_HOST) have another name on the way.

A container gets all devices of its node, and the planned variables (CUDA_VISIBLE_DEVICES ...) select among them, as without a
container. A container with some of them would number these from 0, and the planned numbers are those of the node.

A rank has the uid of the user on the node, which the image need not know: getpass.getuser() and `~user` then fail, and HOME may
be a folder that this user cannot write. So the entries of its user and group are added, and HOME is chosen.
"""

from __future__ import annotations

import hashlib
import shlex
from typing import TYPE_CHECKING, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from clustertool.model.container.container_runtimes import APPTAINER, DOCKER, PODMAN
from clustertool.model.job.start_error import after_prelude
from clustertool.model.launcher_variables import patterns
from clustertool.model.paths import OURS, JobPaths
from clustertool.model.rank_signals import REAL_TIME

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import ContainerSpec, Spec, SpecProcess


_SHELL = "/bin/sh"


class RankUser(NamedTuple):
    """The user of a rank on its node. home: HOME if that of the image cannot be written: ROOT_DIR/.clustertool/home."""

    name: str
    uid: int
    gid: int
    home: str


def passwd(text: str, user: RankUser) -> str:
    """Return the text of an image's /etc/passwd with an entry for the user; unchanged where it has one."""
    entry = f"{_field(user.name)}:x:{user.uid}:{user.gid}::{_field(user.home)}:{_SHELL}"
    return _with_entry(text, entry, user.uid)


def group(text: str, user: RankUser) -> str:
    """Return the text of an image's /etc/group with an entry for the user's primary group; unchanged where it has one."""
    return _with_entry(text, f"{_field(user.name)}:x:{user.gid}:", user.gid)


def _with_entry(text: str, entry: str, number: int) -> str:
    """Add an entry to the lines of a file of /etc, unless one of them has this number."""
    lines = [line for line in text.split("\n") if line]
    known = any(line.split(":")[2:3] == [str(number)] for line in lines)
    return "\n".join([*lines, *([] if known else [entry]), ""])


def _field(text: str) -> str:
    """Replace characters that separate fields or lines, or cannot be printed, by an underscore."""
    return "".join("_" if sign == ":" or not sign.isprintable() else sign for sign in text)


# Of a shell in an image: HOME is the image's where this user can write it. `/` is that of a user without an entry.
# CLUSTERTOOL_HOME: the folder of RankUser.home, "" where HOME stays.
HOME_SCRIPT = """\
if [ -n "$CLUSTERTOOL_HOME" ] && { [ ! -d "$HOME" ] || [ ! -w "$HOME" ] || [ "$HOME" = / ]; }; then
    export HOME="$CLUSTERTOOL_HOME"
fi
"""


# kind -> (patterns of device files and of their folders, files and folders of the driver that programs load)
FILES: Dict[str, Tuple[Tuple[str, ...], Tuple[str, ...]]] = {
    "dcu": (("/dev/kfd", "/dev/mkfd", "/dev/dri"), ("/opt/hyhal",)),
    "xpu": (("/dev/xpu[0-9]*", "/dev/xpuctrl"), ()),
    "npu": (
        ("/dev/davinci[0-9]*", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"),
        ("/usr/local/Ascend/driver", "/usr/local/dcmi", "/etc/ascend_install.info", "/etc/hccn.conf"),
    ),
}
# What in an option of the user states which NVIDIA GPUs a container gets
CHOSEN = ("--gpus", "nvidia.com/gpu", "--nv")


def device_patterns(kind: str) -> List[str]:
    """List the patterns (glob) of device files and drivers, whose matches on a node are `present` of device_options().

    kind: of the devices, such as gpu.
    """
    return [pattern for part in FILES.get(kind, ()) for pattern in part]


def device_options(runtime: str, kind: str, present: Sequence[str], chosen: Sequence[str] = ()) -> List[str]:
    """Build the options by which a rank that has devices of `kind` gets all devices of its node, and their drivers.

    runtime: docker, podman or apptainer. present: the paths on the node that match `device_patterns(kind)`. chosen: the user's
    options; if they state GPUs, none are added.
    """
    if kind == "gpu":
        if any(mark in option for option in chosen for mark in CHOSEN):
            return []
        by_runtime = {DOCKER: ["--gpus", "all"], APPTAINER: ["--nv"]}
        return by_runtime.get(runtime, ["--device", "nvidia.com/gpu=all"])
    drivers = FILES.get(kind, ((), ()))[1]
    mounted = [path for path in present if path in drivers]
    if runtime == APPTAINER:  # it has the node's /dev
        options = ["--rocm"] if kind == "dcu" else []
        return options + [part for path in mounted for part in ("--bind", f"{path}:{path}:ro")]
    options = [part for path in present if path not in mounted for part in ("--device", path)]
    return options + [part for path in mounted for part in ("--volume", f"{path}:{path}:ro")]


JOB_LABEL, NODE_LABEL, PLACE_LABEL = "clustertool.job", "clustertool.node", "clustertool.place"
MARK = "CLUSTERTOOL_MARK"
_RENAMED = "CLUSTERTOOL_ENV_"
_NO_PRIVILEGES = "no-new-privileges"
_MEMORY = "as"  # a limit that no runtime sets: the shell in the image does
ACCOUNTS = ("passwd", "group")
_APPTAINER = "APPTAINERENV_"
_PREFIXES = tuple(
    "APPTAINER BUILDAH_ CONTAINER DBUS_ DOCKER_ GO LD_ LISTEN_ NOTIFY_ PODMAN_ REGISTRY_ SINGULARITY SSL_ STORAGE_ XDG_ "
    "_CONTAINERS".split()
)
# The client's processes must not be taken for the rank: CLUSTERTOOL_ROLE names that.
_NAMES = "BASH_ENV CLUSTERTOOL_ROLE ENV HOME HOSTNAME LOGNAME PATH SHELL TEMP TMP TMPDIR USER container".split()
# The program of the container. It runs in the shell of the image, in bash where the image has one and there is a prelude.
# The file CLUSTERTOOL_MAIN exists and has some bytes: they can be replaced on a full disk.
_SCRIPT = """\
if [ -n "$CLUSTERTOOL_PRELUDE" ] && [ -z "$BASH_VERSION" ] && command -v bash >/dev/null 2>&1; then
    exec bash -c 'eval "$CLUSTERTOOL_RUN"' "$0" "$@"
fi
OPEN_LOG
umask "$CLUSTERTOOL_UMASK"
set -f
for ct_name in $CLUSTERTOOL_RENAMED; do
    eval "export $ct_name=\\"\\$CLUSTERTOOL_ENV_$ct_name\\""
    unset "CLUSTERTOOL_ENV_$ct_name"
done
IFS='
'
for ct_line in $(export -p); do
    ct_name=${ct_line#export }
    ct_name=${ct_name#declare -x }
    ct_name=${ct_name%%=*}
    case "$ct_name" in
    *[!A-Za-z0-9_]*) ;;
    PATTERNS|*_[Pp][Rr][Oo][Xx][Yy])
        case " $CLUSTERTOOL_NAMES " in
        *" $ct_name "*) ;;
        *) unset "$ct_name" ;;
        esac ;;
    esac
done
unset IFS ct_name ct_line
set +f
if [ -n "$CLUSTERTOOL_LIBRARIES" ]; then
    export LD_LIBRARY_PATH="$CLUSTERTOOL_LIBRARIES${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
HOME_SCRIPT
if [ -n "$CLUSTERTOOL_MEMORY" ]; then
    ulimit -S -v "$CLUSTERTOOL_MEMORY"
fi
unset CLUSTERTOOL_RUN CLUSTERTOOL_LOG CLUSTERTOOL_MAIN CLUSTERTOOL_UMASK CLUSTERTOOL_HOME CLUSTERTOOL_MEMORY
unset CLUSTERTOOL_RENAMED CLUSTERTOOL_NAMES CLUSTERTOOL_LIBRARIES
""" + after_prelude("clustertool: the command $1 does not exist in the image, or cannot be executed")


# Only what each shell has itself.
_ACCOUNTS_SCRIPT = """\
for ct_file; do
    if [ -r "$ct_file" ]; then
        while IFS= read -r ct_line || [ -n "$ct_line" ]; do [ -z "$ct_line" ] || printf '%s\\n' "$ct_line"; done <"$ct_file"
    fi
    echo :
done
"""
_LOG = """\
exec </dev/null >>"$CLUSTERTOOL_LOG" 2>&1
echo $$ 1<>"$CLUSTERTOOL_MAIN"
"""
# Where a scheduler signals all processes. The client would pass on what the program gets without it, and without --sig-proxy it
# ends at SIGTERM, with code 0. So a shell starts the container, and asks for its end again when a client was ended.
_STEP_CLIENT = """\
trap : HUP INT TERM USR1 USR2 SIGNALS
podman=$1 name=$2 code=
shift 2
"$podman" "$@" >/dev/null || exit
while [ -z "$code" ] && "$podman" container exists "$name"; do
    code=$("$podman" wait "$name" 2>/dev/null)
done
"$podman" rm --force "$name" >/dev/null 2>&1
exit "${code:-125}"
"""
# conmon ends at SIGUSR2 and real-time signals, and passes others on to the program, which gets them without it. The program
# would start with the mask of conmon, so this script stands for the OCI runtime too, which conmon starts.
_CONMON = """\
#!/bin/sh
exec PYTHON -ISs -c '
import os, signal, sys
program, script, *arguments = sys.argv[1:]
runtime = os.environ.pop("CLUSTERTOOL_RUNTIME", "")
if runtime:
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    program = runtime
else:
    signal.pthread_sigmask(signal.SIG_BLOCK, {1, 2, 3, 12, 15, *range(34, 65)})
    if "-r" in arguments:
        place = arguments.index("-r") + 1
        os.environ["CLUSTERTOOL_RUNTIME"], arguments[place] = arguments[place], script
os.execv(program, [program, *arguments])
' PROGRAM "$0" "$@"
"""
# Variables of a session inside a rank, which the rank itself does not have.
_OF_SESSION = ("CLUSTERTOOL_RUN", "_CLUSTERTOOL_SESSION", "TERM")


class Surroundings(NamedTuple):
    """What a rank has from its supervisor.

    limits: name, as ulimits are called -> soft and hard, -1: none; _MEMORY too. present: see device_options(). home: see
    RankUser. accounts: files of /etc with the user, which the job's own folder has for an image without an entry. in_step: a
    scheduler signals all processes of the node. conmon: the path of the script of conmon_script(), "" for podman's own.
    """

    attempt: int = 0
    umask: int = 0o022
    limits: Mapping[str, Tuple[int, int]] = {}
    present: Sequence[str] = ()
    home: str = ""
    accounts: Sequence[str] = ()
    in_step: bool = False
    conmon: str = ""


def place_of(mark: str) -> str:
    """Compute the value of the label by which the containers of a job on one node are found. It hides the job's token.

    mark: that of the job's processes on the node, with this token in it.
    """
    return hashlib.sha256(mark.encode()).hexdigest()[:16]


def name_of(job: str, mark: str, role: str, rank: int, attempt: int) -> str:
    """Compute the name of a rank's container in an attempt. mark: see place_of()."""
    return f"ct-{job}-{role}{rank}-{attempt}-{place_of(mark)[:8]}"


def command(
    container: ContainerSpec, spec: Spec, process: SpecProcess, names: List[str], around: Surroundings
) -> List[str]:
    """Build the command line of the client that starts a rank in a container. names: of its variables (passed_variables()).

    Where a scheduler signals all processes (in_step), a shell starts podman's container in the background, and waits for it.
    """
    runtime = container["runtime"]
    kind, given = spec["device_kind"], container["options"]
    options = device_options(runtime, kind, around.present, given) if process["devices"] else []
    mounts = list(dict.fromkeys(filter(None, (spec["job_dir"], spec["work_dir"], around.home))))
    argv = [str(argument) for argument in process["argv"]]
    if runtime == APPTAINER:
        return _apptainer(container, spec, options, mounts) + ["sh", *_shell(argv)]
    name = name_of(spec["job"], spec["mark"], process["role"], process["rank"], around.attempt)
    waits = runtime == PODMAN and around.in_step
    made = [container["program"]]
    if waits:
        made = ["/bin/sh", "-c", _STEP_CLIENT.replace("SIGNALS", " ".join(map(str, REAL_TIME))), "client", *made, name]
        made += [f"--conmon={around.conmon}"] if around.conmon else []
    made += ["run", "--detach" if waits else "--rm", "--pull=never", "--log-driver=none"]
    made += ["--net=host", "--ipc=host", "--pid=host"]
    made += ["--http-proxy=false"] if runtime == PODMAN else []
    # As apptainer: a program of the image that is setuid root would be root of the node, where it is no user namespace.
    if not any(_NO_PRIVILEGES in one for one in container["options"]):
        made.append(f"--security-opt={_NO_PRIVILEGES}")
    made += ["--entrypoint=sh", f"--name={name}", *_labels(spec), *_user(container)]
    # A rank has threads for each core, and data loaders.
    made += ["--pids-limit=-1"] if container["process_limit"] else []
    made += [f"--ulimit={limit}={soft}:{hard}" for limit, (soft, hard) in around.limits.items() if limit != _MEMORY]
    made += [f"--workdir={spec['work_dir']}", *(_mount(path, path) for path in mounts)]
    made += [_mount(JobPaths.at(spec["job_dir"]).of(OURS, file), f"/etc/{file}") for file in around.accounts]
    made += [f"--volume={volume}" for volume in container["volumes"]]
    made += [f"--env={name}" for name in names]
    return [*made, *options, *container["options"], container["image"], *_shell(argv)]


def conmon_script(path: str, python: str) -> str:
    """Build a script that starts the conmon at this path so that it obeys and passes on no signal. python: an interpreter."""
    return _CONMON.replace("PYTHON", shlex.quote(python)).replace("PROGRAM", shlex.quote(path))


def accounts_command(container: ContainerSpec, spec: Spec) -> List[str]:
    """Build the command line that writes the image's files of ACCOUNTS: the lines of each, and a line of one colon."""
    return [
        *(container["program"], "run", "--rm", "--pull=never", "--log-driver=none", "--net=none"),
        *("--entrypoint=sh", *_labels(spec), container["image"], "-c", _ACCOUNTS_SCRIPT, "clustertool"),
        *(f"/etc/{file}" for file in ACCOUNTS),
    ]


def read_accounts(text: str, user: RankUser) -> Dict[str, str]:
    """Parse the output of accounts_command(); return {file: its text with an entry} for files without the user or its group."""
    found, files = dict.fromkeys(ACCOUNTS, ""), iter(ACCOUNTS)
    file = next(files)
    for line in text.split("\n")[:-1]:
        if line == ":":
            file = next(files, "")
        elif file:
            found[file] += f"{line}\n"
    made = {"passwd": passwd(found["passwd"], user), "group": group(found["group"], user)}
    return {file: text for file, text in made.items() if text != found[file]}


def _labels(spec: Spec) -> List[str]:
    """Build the options for the labels: the job, the node, and the place by which containers are found."""
    labels = {JOB_LABEL: spec["job"], NODE_LABEL: spec["node"], PLACE_LABEL: place_of(spec["mark"])}
    return [f"--label={name}={value}" for name, value in labels.items()]


def _mount(path: str, target: str) -> str:
    """Build the option that mounts a folder or a file. --volume splits its value at each colon; --mount has fields of CSV.

    path: on the node. target: in the container.
    """
    return f"--mount=type=bind,{_fields(path, target)}" if ":" in path else f"--volume={path}:{target}"


def _fields(path: str, target: str, name: str = "target") -> str:
    """Build the fields of --mount, quoted as CSV. name: of the second one."""
    fields = (f"source={path}", f"{name}={target}")
    return ",".join('"' + field.replace('"', '""') + '"' if set(field) & set(',"') else field for field in fields)


def _shell(argv: List[str]) -> List[str]:
    """Build the arguments of the container's shell, without "sh", that runs the script in CLUSTERTOOL_RUN.

    The script (_script()) prepares the environment, and then runs `argv`, its positional parameters.
    """
    return ["-c", 'eval "$CLUSTERTOOL_RUN"', "clustertool", *argv]


def _user(container: ContainerSpec) -> List[str]:
    """Build the options by which a rank has the uid and the groups of the user on the node.

    Rootless docker runs it as root inside, which is this user, without the groups; rootless podman keeps all groups, unless
    options add some.
    """
    user, groups = container["uid"], container["groups"] or [container["uid"]]
    if container["rootless"]:  # root in such a container is the user on the node
        if container["runtime"] != PODMAN:
            return ["--user=0:0"]
        # The user's groups, if the OCI runtime is crun: it allows no other group next to them.
        kept = len(groups) > 1 and not any(option.startswith("--group-add") for option in container["options"])
        # Without --user the USER of the image would be the user inside.
        return ["--userns=keep-id", f"--user={user}:{groups[0]}", *(["--group-add=keep-groups"] if kept else [])]
    return [f"--user={user}:{groups[0]}", *(f"--group-add={group}" for group in groups[1:])]


def _bind(path: str) -> str:
    """Build apptainer's option that mounts a path at the same path: --bind, or --mount for a path with , : or ".

    --bind splits its value at commas and colons.
    """
    plain = not any(sign in path for sign in ',:"')
    return f"--bind={path}:{path}" if plain else f"--mount=type=bind,{_fields(path, path, 'destination')}"


def _apptainer(container: ContainerSpec, spec: Spec, options: List[str], mounts: List[str]) -> List[str]:
    """Build the command line of apptainer up to the image."""
    # Without --no-eval a shell evaluates the values of variables: `$` in them, and the text of the wrapper.
    made = [container["program"], "exec", "--cleanenv", "--no-eval", "--no-home", f"--pwd={spec['work_dir']}"]
    made += [_bind(path) for path in mounts] + [f"--bind={volume}" for volume in container["volumes"]]
    return [*made, *options, *container["options"], container["image"]]


def session(
    container: ContainerSpec, spec: Spec, process: SpecProcess, variables: Mapping[str, str], around: Surroundings
) -> Tuple[List[str], Dict[str, str]]:
    """Build the beginning of the command line of another program inside a rank, and the variables of its client.

    They are added to those of the client itself. The program and its arguments follow. It starts as the rank has, with the
    terminal or the pipes of the client. apptainer cannot enter a container: the program gets one of its own, like that of the
    rank.
    """
    found = passed_variables(container["runtime"], spec, process, variables, around)
    env = {"CLUSTERTOOL_RUN": _script("")}
    if container["runtime"] == APPTAINER:
        env = {_APPTAINER + "CLUSTERTOOL_RUN": env["CLUSTERTOOL_RUN"]}
        return command(container, spec, {**process, "argv": []}, found.names, around), {**found.env, **env}
    name = name_of(spec["job"], spec["mark"], process["role"], process["rank"], around.attempt)
    options = [f"--workdir={spec['work_dir']}", *(f"--env={variable}" for variable in _OF_SESSION)]
    return [container["program"], "exec", "--interactive", *options, name, "sh", *_shell([])], env


def _script(log: str) -> str:
    """Build the script that runs in the container. log: its lines that open the log of the rank."""
    return _SCRIPT.replace("OPEN_LOG\n", log).replace("PATTERNS", patterns()).replace("HOME_SCRIPT\n", HOME_SCRIPT)


class Passed(NamedTuple):
    """Variables on their way into a container. names: those that it gets. env: what is added to the client's environment."""

    names: List[str]
    env: Dict[str, str]


def passed_variables(
    runtime: str, spec: Spec, process: SpecProcess, variables: Mapping[str, str], around: Surroundings
) -> Passed:
    """Compute the variables that a rank's container gets, and the environment in which its client passes them on.

    variables: those of the rank, by their own names. Those that the client itself obeys have another name on the way.
    """
    renamed = [name for name in sorted(variables) if name in _NAMES or name.upper().startswith(_PREFIXES)]
    on_way = {name: _RENAMED + name for name in renamed}
    on_way.update({name: _RENAMED + name for name in variables if name.lower().endswith("_proxy")})
    paths = JobPaths.at(spec["job_dir"])
    memory = around.limits.get(_MEMORY, (-1, -1))[0]
    env = {
        **{on_way.get(name, name): value for name, value in variables.items()},
        "CLUSTERTOOL_RUN": _script(_LOG),
        "CLUSTERTOOL_LOG": paths.of(paths.written(paths.log(process["role"], process["rank"], around.attempt))),
        "CLUSTERTOOL_MAIN": paths.of(paths.main_file(process["role"], process["rank"])),
        "CLUSTERTOOL_UMASK": f"{around.umask:03o}",
        "CLUSTERTOOL_RENAMED": " ".join(on_way),
        "CLUSTERTOOL_LIBRARIES": spec["ld_library_path"],
        "CLUSTERTOOL_PRELUDE": spec["prelude"],
        "CLUSTERTOOL_HOME": "" if "HOME" in variables else around.home,
        "CLUSTERTOOL_MEMORY": "" if memory < 0 else str(memory >> 10),
        MARK: spec["mark"],
    }
    env["CLUSTERTOOL_NAMES"] = " ".join([*sorted({*env, *variables}), "CLUSTERTOOL_NAMES"])
    names = sorted(env)
    if runtime == APPTAINER:
        env = {**{_APPTAINER + name: value for name, value in env.items()}, MARK: spec["mark"]}
    return Passed(names, env)


def removal(runtime: str, program: str, mark: str) -> List[str]:
    """Build the command that removes all containers of a job on this node, and writes the ids of those that are left.

    program: the path of the runtime's client. mark: see place_of(). It exits with another code than 0 if this cannot be known.
    Empty for a runtime without a list of containers.
    """
    if runtime not in (DOCKER, PODMAN):
        return []
    return ["/bin/sh", "-c", _REMOVE, "sh", program, f"label={PLACE_LABEL}={place_of(mark)}"]


_REMOVE = """\
found=$("$1" ps --all --quiet --no-trunc --filter "$2") || exit 1
[ -n "$found" ] || exit 0
"$1" rm --force --time 0 $found >/dev/null 2>&1 || "$1" rm --force $found >/dev/null || :
exec "$1" ps --all --quiet --no-trunc --filter "$2"
"""
