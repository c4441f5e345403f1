"""The command line of a rank's container, and the program inside: it runs here in each shell that an image may have."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clustertool.model.container.container_command import (
    RankUser,
    Surroundings,
    accounts_command,
    command,
    conmon_script,
    name_of,
    passed_variables,
    place_of,
    read_accounts,
    removal,
)

MARK = "j1/2/token"
AROUND = Surroundings(attempt=3, umask=0o027, limits={"nofile": (1024, 4096), "core": (0, -1)})


def spec(**more: Any) -> Any:
    made = {
        "job": "j1",
        "node": 2,
        "mark": MARK,
        "job_dir": "/root/JOBj1",
        "work_dir": "/root/JOBj1",
        "device_kind": "cpu",
    }
    return {**made, "ld_library_path": "", "prelude": "", **more}


def container(**more: Any) -> Any:
    made = {"runtime": "podman", "program": "/usr/bin/podman", "rootless": False, "image": "sha256:12", "digest": ""}
    made["process_limit"] = False
    return {**made, "reference": "img:1", "options": [], "volumes": [], "uid": 7, "groups": [8, 9], **more}


def process(*argv: str, **more: Any) -> Any:
    return {"role": "trainer", "rank": 5, "argv": list(argv or ("python3", "train.py")), "devices": [], **more}


def line(**more: Any) -> list[str]:
    return command(container(**more), spec(), process(), ["A", "B"], AROUND)


def test_podman_where_a_scheduler_signals_all_processes() -> None:
    """A shell waits for the container. The others are clients that pass on what they get."""
    around = AROUND._replace(in_step=True, conmon="/root/conmon")
    found = command(container(), spec(), process(), ["A"], around)
    alone = command(container(), spec(), process(), ["A"], AROUND)
    assert (found[:2], found[3:5]) == (["/bin/sh", "-c"], ["client", "/usr/bin/podman"])
    assert found[5] == name_of("j1", MARK, "trainer", 5, 3)
    assert found[6:9] == ["--conmon=/root/conmon", "run", "--detach"]
    assert found[9:] == alone[3:]
    assert "--rm" in command(container(runtime="docker"), spec(), process(), ["A"], around)


CLIENT = """\
#!/bin/sh
cd "$(dirname "$0")"
echo "$*" >>asked
case $1 in
run) echo 1234; exit "$(cat code)" ;;
container) test -e there ;;
wait) rm there; kill -s TERM $PPID; test -e ended || { echo >ended; touch there; exit 0; }; echo 137 ;;
esac
"""


@pytest.mark.parametrize(("code", "wanted"), [(0, 137), (126, 126)])
def test_the_shell_that_waits_for_a_container(tmp_path: Path, code: int, wanted: int) -> None:
    """A signal ends the client that waits, with code 0 and without the exit code of the container: it is asked again."""
    (tmp_path / "podman").write_text(CLIENT)
    (tmp_path / "podman").chmod(0o755)
    (tmp_path / "code").write_text(str(code))
    (tmp_path / "there").touch()
    around = AROUND._replace(in_step=True)
    argv = command(container(program=str(tmp_path / "podman")), spec(), process(), [], around)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (wanted, "")
    asked = [line.split()[0] for line in (tmp_path / "asked").read_text().splitlines()]
    assert asked == (["run", "container", "wait", "container", "wait", "rm"] if not code else ["run"])


def test_the_script_that_starts_conmon(tmp_path: Path) -> None:
    """The signals are blocked in conmon, and not in what it starts as the OCI runtime."""
    mask = "grep SigBlk /proc/self/status"
    (tmp_path / "runc").write_text(f'#!/bin/sh\necho "runtime $*$CLUSTERTOOL_RUNTIME" $({mask})\n')
    (tmp_path / "con mon").write_text(f'#!/bin/sh\necho "conmon $1 $2" $({mask})\n"$4" create x\n')
    (tmp_path / "script").write_text(conmon_script(str(tmp_path / "con mon"), sys.executable))
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    argv = [tmp_path / "script", "-c", "id", "-r", tmp_path / "runc"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True)
    blocked = sum(1 << (number - 1) for number in (1, 2, 3, 12, 15, *range(34, 65)))
    assert done.stdout == f"conmon -c id SigBlk: {blocked:016x}\nruntime create x SigBlk: {0:016x}\n"


COMMON = ["--rm", "--pull=never", "--log-driver=none", "--net=host", "--ipc=host", "--pid=host"]
IDENTITY = [
    "--security-opt=no-new-privileges",
    "--entrypoint=sh",
    f"--name=ct-j1-trainer5-3-{place_of(MARK)[:8]}",
    "--label=clustertool.job=j1",
    "--label=clustertool.node=2",
    f"--label=clustertool.place={place_of(MARK)}",
]
REST = ["--ulimit=nofile=1024:4096", "--ulimit=core=0:-1", "--workdir=/root/JOBj1", "--volume=/root/JOBj1:/root/JOBj1"]
PROGRAM = ["-c", 'eval "$CLUSTERTOOL_RUN"', "clustertool", "python3", "train.py"]


def test_docker() -> None:
    found = line(runtime="docker", program="/usr/bin/docker", options=["--shm-size=1g"], volumes=["/data:/data:ro"])
    user = ["--user=7:8", "--group-add=9"]
    given = ["--volume=/data:/data:ro", "--env=A", "--env=B", "--shm-size=1g", "sha256:12"]
    assert found == ["/usr/bin/docker", "run", *COMMON, *IDENTITY, *user, *REST, *given, *PROGRAM]


def test_podman() -> None:
    user = ["--user=7:8", "--group-add=9"]
    given = ["--env=A", "--env=B", "sha256:12"]
    assert line() == [
        "/usr/bin/podman",
        "run",
        *COMMON,
        "--http-proxy=false",
        *IDENTITY,
        *user,
        *REST,
        *given,
        *PROGRAM,
    ]


def test_without_root() -> None:
    """Root inside of a rootless docker is the user; podman keeps the ids, and with crun the groups."""
    assert "--user=0:0" in line(runtime="docker", rootless=True)
    assert {"--userns=keep-id", "--user=7:8", "--group-add=keep-groups"} < set(line(rootless=True))
    assert "--group-add=keep-groups" not in line(rootless=True, options=["--group-add", "44"])


def test_the_user_of_a_rank_in_the_image() -> None:
    """The folder that may be its HOME, and files of /etc with an entry for it where the image has none."""
    around = AROUND._replace(home="/root/.clustertool/home", accounts=("passwd",))
    found = command(container(runtime="docker"), spec(), process(), [], around)
    mounts = ("/root/.clustertool/home:/root/.clustertool/home", "/root/JOBj1/.clustertool/passwd:/etc/passwd")
    assert {f"--volume={mount}" for mount in mounts} < set(found)
    of_apptainer = command(container(runtime="apptainer"), spec(), process(), [], around)
    assert f"--bind={mounts[0]}" in of_apptainer and not any("/etc/" in one for one in of_apptainer), (
        "it adds the entry itself"
    )
    assert passed_variables("docker", spec(), process(), {}, around).env["CLUSTERTOOL_HOME"] == around.home
    assert passed_variables("docker", spec(), process(), {"HOME": "/h"}, around).env["CLUSTERTOOL_HOME"] == "", (
        "ENV of conf.py has one"
    )


def test_files_of_users_are_read_from_the_image(tmp_path: Path) -> None:
    user = RankUser("ann", 7, 8, "/h")
    *_, script, name, _passwd, _group = accounts_command(container(runtime="docker"), spec())
    (tmp_path / "passwd").write_text("root:x:0:0:root:/:/\n\nlast:x:9:9::/:/bin/sh")
    for files, found in (
        (
            ("passwd", "none"),
            {"passwd": "root:x:0:0:root:/:/\nlast:x:9:9::/:/bin/sh\nann:x:7:8::/h:/bin/sh\n", "group": "ann:x:8:\n"},
        ),
        (("none", "none"), {"passwd": "ann:x:7:8::/h:/bin/sh\n", "group": "ann:x:8:\n"}),
    ):
        argv = ["sh", "-c", script, name, *(str(tmp_path / file) for file in files)]
        assert read_accounts(subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True).stdout, user) == found
    assert read_accounts("ann:x:7:8::/h:/bin/sh\n:\nann:x:8:\n:\n", user) == {}


def test_programs_get_no_further_privileges_unless_an_option_is_about_them() -> None:
    for runtime in ("docker", "podman"):
        given = ["--security-opt=no-new-privileges:false"]
        assert [one for one in line(runtime=runtime, options=given) if "privileges" in one] == given


def test_a_limit_of_the_address_space_is_set_inside() -> None:
    """No runtime has it."""
    around = AROUND._replace(limits={"as": (1 << 30, -1)})
    assert "--ulimit=as" not in " ".join(command(container(), spec(), process(), [], around))
    assert passed_variables("podman", spec(), process(), {}, around).env["CLUSTERTOOL_MEMORY"] == str(1 << 20)
    assert passed_variables("podman", spec(), process(), {}, AROUND).env["CLUSTERTOOL_MEMORY"] == ""


def test_a_runtime_with_a_limit_of_processes() -> None:
    """A user's own limit stands behind ours, and the last one counts."""
    found = line(process_limit=True, options=["--pids-limit=64"])
    assert [option for option in found if "pids" in option] == ["--pids-limit=-1", "--pids-limit=64"]


@pytest.mark.parametrize(
    ("path", "option", "bind"),
    [
        ("/r/JOBa", "--volume=/r/JOBa:/r/JOBa", "--bind=/r/JOBa:/r/JOBa"),
        (
            "/r:1/a",
            "--mount=type=bind,source=/r:1/a,target=/r:1/a",
            "--mount=type=bind,source=/r:1/a,destination=/r:1/a",
        ),
        ("/r,1", "--volume=/r,1:/r,1", '--mount=type=bind,"source=/r,1","destination=/r,1"'),
        (
            '/r:1,"x',
            '--mount=type=bind,"source=/r:1,""x","target=/r:1,""x"',
            '--mount=type=bind,"source=/r:1,""x","destination=/r:1,""x"',
        ),
    ],
)
def test_folders_whose_names_have_separators(path: str, option: str, bind: str) -> None:
    where = spec(job_dir=path, work_dir=path)
    for runtime, wanted in (("podman", option), ("docker", option), ("apptainer", bind)):
        found = command(container(runtime=runtime), where, process(), [], AROUND)
        assert [one for one in found if one.startswith(("--volume", "--mount", "--bind"))] == [wanted]


def test_names() -> None:
    """The name and the label differ between nodes and attempts, and do not show the token."""
    names = {name_of("j", f"j/{node}/secret", "trainer", 0, attempt) for node in (0, 1) for attempt in (0, 1)}
    assert len(names) == 4 and not any("secret" in name for name in names)


def test_variables_that_the_client_obeys_have_another_name_on_the_way() -> None:
    values = {"RANK": "1", "PATH": "/x", "HOME": "/h", "DOCKER_HOST": "d", "https_proxy": "p", "CLUSTERTOOL_ROLE": "t"}
    found = passed_variables("podman", spec(), process(), values, AROUND)
    assert found.env["RANK"] == "1" and found.env["CLUSTERTOOL_ENV_PATH"] == "/x"
    assert not found.env.keys() & {"PATH", "HOME", "DOCKER_HOST", "https_proxy", "CLUSTERTOOL_ROLE"}
    assert set(found.names) == set(found.env) and found.env["CLUSTERTOOL_MARK"] == MARK
    inside = passed_variables("apptainer", spec(), process(), values, AROUND).env
    assert inside["APPTAINERENV_CLUSTERTOOL_ENV_PATH"] == "/x" and inside["CLUSTERTOOL_MARK"] == MARK
    assert {name for name in inside if not name.startswith("APPTAINERENV_")} == {"CLUSTERTOOL_MARK"}


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox"])
def test_program_in_the_image(tmp_path: Path, shell: str) -> None:
    """Renamed variables, the image's own ones of launchers, libraries, log, pid, umask, PRELUDE."""
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"no {shell} here")
    folder = tmp_path / "JOBj1"
    (folder / ".clustertool/log/attempt3").mkdir(parents=True)
    main = folder / ".clustertool/main-trainer-5"
    main.write_text("-" * 15 + "\n")
    values = {"PATH": "/usr/bin:/bin", "HOME": "a 'b' $c\nd", "RANK": "1", "SLURM_JOB_ID": "5", "CLUSTERTOOL_RANK": "5"}
    where = spec(job_dir=str(folder), ld_library_path="/lib/conf", prelude="export LATE=prelude")
    rank = process("sh", "-c", 'env -0 >env; umask; echo "pid $$ $1"', "x", "two words")
    given = passed_variables("podman", where, rank, values, AROUND)
    image = {"PATH": "/bin", "HOME": "/image", "LD_LIBRARY_PATH": "/lib/image", "SLURM_PROCID": "1", "LOCAL_RANK": "2"}
    image.update({"OWN": "SLURM_X y\nexport PMI_RANK='1", "PMIX_A": "1", "MASTER_ADDR": "image"})
    argv = command(container(), where, rank, given.names, AROUND)
    start = ["sh"] if shell == "busybox" else []
    inside = argv[argv.index("-c") :]
    subprocess.run([found, *start, *inside], env={**image, **given.env}, cwd=tmp_path, check=True, timeout=30)
    pid = main.read_text().splitlines()[0]
    assert (folder / ".clustertool/log/attempt3/workerlog.5").read_text() == f"0027\npid {pid} two words\n"
    env = dict(item.split("=", 1) for item in (tmp_path / "env").read_text().split("\0") if item)
    for name in ("_", "PWD", "SHLVL", "OLDPWD", "CLUSTERTOOL_MARK"):
        env.pop(name, None)
    wanted = {**values, "LD_LIBRARY_PATH": "/lib/conf:/lib/image", "OWN": image["OWN"], "LATE": "prelude"}
    assert env == wanted


def test_removal() -> None:
    argv = removal("docker", "/usr/bin/docker", MARK)
    assert argv[-2:] == ["/usr/bin/docker", f"label=clustertool.place={place_of(MARK)}"]
    assert removal("apptainer", "/usr/bin/apptainer", MARK) == []
