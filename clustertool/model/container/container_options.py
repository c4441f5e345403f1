"""This table has the options of a container's runtime that a user may add, and those that the tool itself sets."""

from __future__ import annotations

from typing import Dict, Sequence

from clustertool.model.container.container_runtimes import APPTAINER

_NETWORK = "ranks use the network of their node"
_SPACES = "ranks share processes and memory with their node"
_OUTPUT = "the output of ranks is in the job's directory"
_PROCESS = "the tool starts and ends the containers itself"
_VARIABLES = "write variables into ENV, [env] or --env"
_USER = "ranks run as the user of the job"
_FOLDER = "the working directory of ranks is that of the job"
_MOUNTS = "write it into `volumes`"
# Of docker and podman: long options, and short ones.
_REFUSED: Dict[str, str] = {
    **dict.fromkeys(("net", "network", "net-alias", "network-alias", "publish", "p", "publish-all", "P"), _NETWORK),
    **dict.fromkeys(("ipc", "pid", "uts", "init", "pod"), _SPACES),
    **dict.fromkeys(("log-driver", "log-opt"), _OUTPUT),
    **dict.fromkeys(
        """name rm detach d interactive i tty t attach a detach-keys restart replace rmi cidfile conmon-pidfile pidfile label l
        label-file entrypoint stop-signal stop-timeout sig-proxy help""".split(),
        _PROCESS,
    ),
    **dict.fromkeys(("env", "e", "env-file", "env-host", "env-merge", "unsetenv", "unsetenv-all"), _VARIABLES),
    **dict.fromkeys(("user", "u", "userns", "uidmap", "gidmap"), _USER),
    **dict.fromkeys(("workdir", "w"), _FOLDER),
    "http-proxy": "ranks have the proxies of ENV, [env] and --env only",
    **dict.fromkeys(("volume", "v"), _MOUNTS),
    "pull": "write it into `pull`",
}
_OF_APPTAINER: Dict[str, str] = {
    **dict.fromkeys(("net", "n", "network", "network-args"), _NETWORK),
    **dict.fromkeys(("pid", "p", "ipc", "i", "uts", "containall", "C"), _SPACES),
    **dict.fromkeys(("env", "env-file"), _VARIABLES),
    **dict.fromkeys(("fakeroot", "f", "security"), _USER),
    **dict.fromkeys(("pwd", "cwd", "home", "H"), _FOLDER),
    **dict.fromkeys(("bind", "B", "mount"), _MOUNTS),
    "help": _PROCESS,
}
# Options without a value: an argument behind one of them would be the image.
_FLAGS = """privileged read-only oom-kill-disable no-healthcheck no-hosts disable-content-trust quiet q http-proxy
    read-only-tmpfs tls-verify rootfs nv nvccli rocm cleanenv e contain c writable w writable-tmpfs no-home no-init
    no-privs keep-privs no-umask userns u compat no-eval disable-cache sharens sif-fuse underlay""".split()
_SHORT_FLAGS = "ditqPeciCfuwn"  # several of them may stand behind one dash


def describe_refused(options: Sequence[str], runtime: str) -> str:
    """Describe the first of the arguments `options` that a user may not add, and why; "" if there is none.

    Refused are options by which the tool itself sets something, "--", and a word that is no option and no value of one. Options
    that the runtime does not know are not found. runtime: as in the settings; with "auto" the options are those of docker and
    podman.
    """
    table = _OF_APPTAINER if runtime == APPTAINER else _REFUSED
    value_may_follow = False
    for option in options:
        if not option.startswith("-") or option == "-":
            if not value_may_follow:
                return f"{option!r}: it is no option and no value of one; the image has a key of its own"
            value_may_follow = False
            continue
        if option == "--":
            return f"{option!r}: the tool states the program"
        name, equals, _ = option.lstrip("-").partition("=")
        for each in [name] if option.startswith("--") else _letters(name):
            if each in table:
                return f"{option}: {table[each]}"
        value_may_follow = not equals and name not in _FLAGS
    return ""


def _letters(text: str) -> str:
    """Return the short options of an argument without its dash: `it` has two, `m4g` and `m` have one."""
    count = next((at for at, letter in enumerate(text) if letter not in _SHORT_FLAGS), len(text) - 1)
    return text[: count + 1]
