"""How one host is reached: conf.py first, then ssh's own configuration, then ssh's defaults. Nothing is opened here.

ssh's configuration is read as ssh reads it, by `ssh -G`, which is a process for every host. It is left out where no
line of the configuration could change the answer, so that a thousand plain hosts cost nothing. Without an ssh client
paramiko's reader stands in.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import os
import pwd
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paramiko.config import SSHConfig
from paramiko.ssh_exception import ConfigParseError

from clustertool.errors import ConfigError
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host, is_address, valid_host, valid_user
from clustertool.ssh import ownership

SYSTEM_CONFIG = "/etc/ssh/ssh_config"
SYSTEM_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa", "id_ed25519_sk", "id_ecdsa_sk")
_DEFAULT_LINES = {f"~/.ssh/{name}" for name in (*DEFAULT_KEYS, "id_dsa", "id_xmss")}
_SPAWN_LIMIT = 20.0  # seconds for `ssh -G`; a `Match exec` of the user's runs inside
_HOPS_LIMIT = 8

# Only these keywords change what we do; a configuration without them need not be asked.
_MATTERS = {
    "hostname",
    "user",
    "port",
    "identityfile",
    "identitiesonly",
    "identityagent",
    "proxyjump",
    "proxycommand",
    "hostkeyalias",
    "userknownhostsfile",
    "globalknownhostsfile",
    "stricthostkeychecking",
    "canonicalizehostname",
}
_PATHS = {"identityagent", "userknownhostsfile", "globalknownhostsfile"}  # where ssh -G expands `~`
_HOP = re.compile(
    r"(?:ssh://)?(?:([^@\s]+)@)?"  # user
    r"(?:\[([^\]\s]+)\]|([^:@\s\[\]-][^:@\s\[\]]*|[0-9a-fA-F:]+))"  # [host] or host
    r"(?::(\d+))?/?"  # port
)
_FIX_HOP = 'write a gateway as "[user@]host[:port]", several with commas between them'


@dataclass(frozen=True)
class SshSettings:
    """All that is needed to connect. `gateways` is the whole chain of jump hosts, the one next to us first."""

    name: str  # as the user wrote it
    hostname: str  # what to connect to
    user: str
    port: int = 22
    identity_files: tuple[str, ...] = ()
    identities_given: bool = False  # False: identity_files are ssh's default names
    identities_only: bool = False
    agent: str = ""  # the agent's socket, "" for none
    proxy_command: str = ""
    gateways: tuple[SshSettings, ...] = ()
    host_key_name: str = ""  # the host's name in known_hosts
    host_keys: str = "accept-new"
    known_hosts: tuple[str, ...] = ()  # a new key is appended to the first one
    system_known_hosts: tuple[str, ...] = ()
    connect_timeout: float = 10.0
    gateway: bool = False  # a jump host, not a node

    @property
    def indirect(self) -> bool:
        """Behind a gateway or a ProxyCommand: the tool sends no packet there directly."""
        return bool(self.gateways or self.proxy_command)


def settings(host: Host, cluster: Cluster) -> SshSettings:
    """How to reach `host`. Raises ConfigError if ssh's configuration or GATEWAY cannot be read."""
    found = _settings(host, cluster, cluster.user, cluster.port)
    if cluster.gateway and cluster.gateway.lower() != "none":
        if " " in cluster.gateway.strip():
            return replace(found, proxy_command=cluster.gateway.strip(), gateways=())
        return replace(found, proxy_command="", gateways=_chain(cluster.gateway, found, cluster, 0))
    return replace(found, proxy_command="", gateways=()) if cluster.gateway else found


def check() -> None:
    """Raise ConfigError if another user can have written ssh's configuration, before any connection."""
    _read_config(home(), SYSTEM_CONFIG, _stamps())


def home() -> str:
    return os.environ.get("HOME") or os.path.expanduser("~")


def _settings(host: Host, cluster: Cluster, user: str, port: int, depth: int = 0) -> SshSettings:
    """One host by itself; `user` and `port` are conf.py's defaults for it."""
    user, port = host.user or user, host.port or port
    said = {} if cluster.ssh_config == "none" else _asked(host.host, user, port)
    user = user or _one(said, "user") or local_user()
    port = port or int(_one(said, "port") or 22)
    hostname = _one(said, "hostname") or host.host
    keys, given = _identities(cluster, said, {"h": hostname, "n": host.host, "r": user, "p": str(port)})
    found = SshSettings(
        name=host.name or host.host,
        hostname=hostname,
        user=user,
        port=port,
        identity_files=keys,
        identities_given=given,
        identities_only=_one(said, "identitiesonly") == "yes",
        agent=_agent(said),
        proxy_command=_one(said, "proxycommand"),
        host_key_name=_key_name(said, hostname, port),
        host_keys=_policy(cluster, said),
        known_hosts=_known_hosts(cluster, said),
        system_known_hosts=tuple(_list(said, "globalknownhostsfile")) or SYSTEM_KNOWN_HOSTS,
        connect_timeout=cluster.connect_timeout,
    )
    jump = _one(said, "proxyjump")
    return replace(found, gateways=_chain(jump, found, cluster, depth), proxy_command="") if jump else found


def _chain(text: str, to: SshSettings, cluster: Cluster, depth: int) -> tuple[SshSettings, ...]:
    """ "a,user@b:2222" -> the jump hosts in order. A host that would be its own gateway is reached directly."""
    if depth > _HOPS_LIMIT:
        raise ConfigError(f"the gateways of {to.name} lead in a circle", "look at ProxyJump in ~/.ssh/config", to.name)
    hops: list[SshSettings] = []
    for word in text.split(","):
        jump = _hop(word.strip())
        if jump.host in (to.name, to.hostname) and jump.port in (0, to.port):
            return ()
        hop = _gateway(jump, cluster, depth + 1)
        if (hop.hostname, hop.port) == (to.hostname, to.port):
            return ()
        hops += (
            [*hop.gateways, replace(hop, gateways=())] if not hops else [replace(hop, gateways=(), proxy_command="")]
        )
    return tuple(hops)


def _gateway(hop: Host, cluster: Cluster, depth: int) -> SshSettings:
    """A jump host. conf.py describes the nodes, so ssh's configuration has priority here."""
    found = _settings(hop, replace(cluster, identity_file=""), "", 0, depth)
    if not hop.user and cluster.user and found.user == local_user():
        found = replace(found, user=cluster.user)
    if cluster.identity_file:
        theirs = found.identity_files if found.identities_given else ()
        found = replace(found, identity_files=(*theirs, _expand_home(cluster.identity_file)), identities_given=True)
    return replace(found, gateway=True)


def _hop(word: str) -> Host:
    """ "[user@]host[:port]" or ssh's URI of it -> a Host that is no node."""
    match = _HOP.fullmatch(word)
    bad_port = match and match[4] and not 0 < int(match[4]) < 65536
    host = (match[2] or match[3]) if match else ""
    if not match or bad_port or not valid_host(host) or (match[1] and not valid_user(match[1])):
        raise ConfigError(f"the gateway {word!r} is not right", _FIX_HOP)
    if match[3] and ":" in host and not is_address(host):
        raise ConfigError(f"the gateway {word!r} is not right", _FIX_HOP)
    return Host(index=-1, host=host, user=match[1] or "", port=int(match[4] or 0))


# ---- the values of single settings


def _one(said: Mapping[str, Sequence[str]], key: str) -> str:
    value = (said.get(key) or [""])[0]
    return "" if value.lower() == "none" else value


def _list(said: Mapping[str, Sequence[str]], key: str) -> list[str]:
    return [_expand_home(word) for value in said.get(key, ()) for word in value.split() if word.lower() != "none"]


def _identities(
    cluster: Cluster, said: Mapping[str, Sequence[str]], tokens: Mapping[str, str]
) -> tuple[tuple[str, ...], bool]:
    """The key files to try, and whether they were configured."""
    if cluster.identity_file:
        return (_expand_home(cluster.identity_file),), True
    lines = said.get("identityfile", ())
    named = [line for line in lines if line not in _DEFAULT_LINES]
    if named or (lines and len(lines) < 3):  # ssh -G prints all the default names if none is configured
        known = {**tokens, "d": home(), "u": local_user(), "i": str(os.getuid()), "%": "%"}
        files = (expand(line, known) for line in lines if line.lower() != "none")
        return tuple(_expand_home(file) for file in files), True
    return tuple(os.path.join(home(), ".ssh", name) for name in DEFAULT_KEYS), False


def _agent(said: Mapping[str, Sequence[str]]) -> str:
    socket = os.environ.get("SSH_AUTH_SOCK", "")
    value = (said.get("identityagent") or ["SSH_AUTH_SOCK"])[0]
    if value.lower() == "none":
        return ""
    if value.startswith("$"):
        return os.environ.get(value[1:].strip("{}"), "")
    return socket if value == "SSH_AUTH_SOCK" else _expand_home(value)


def _policy(cluster: Cluster, said: Mapping[str, Sequence[str]]) -> str:
    """conf.py's policy; the user's own StrictHostKeyChecking=yes for a host makes accept-new strict."""
    careful = _one(said, "stricthostkeychecking") in ("true", "yes")
    return "strict" if careful and cluster.host_keys == "accept-new" else cluster.host_keys


def _known_hosts(cluster: Cluster, said: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    if cluster.known_hosts:
        return (_expand_home(cluster.known_hosts),)
    usual = tuple(os.path.join(home(), ".ssh", name) for name in ("known_hosts", "known_hosts2"))
    if "userknownhostsfile" not in said:
        return usual
    files = tuple(_list(said, "userknownhostsfile"))
    passwd = os.path.join(_passwd_home(), ".ssh")  # ssh's defaults are there, the tool's in $HOME
    return usual if files == (f"{passwd}/known_hosts", f"{passwd}/known_hosts2") else files


def _key_name(said: Mapping[str, Sequence[str]], hostname: str, port: int) -> str:
    """How known_hosts calls it: the alias as it is, else the address, with the port unless it is 22."""
    alias = _one(said, "hostkeyalias")
    return alias or (hostname.lower() if port == 22 else f"[{hostname.lower()}]:{port}")


def local_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's nameless user
        return os.environ.get("USER") or str(os.getuid())


def _passwd_home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return home()


def _expand_home(path: str) -> str:
    path = path.strip('"')
    return os.path.join(home(), path[2:]) if path.startswith("~/") else os.path.expanduser(path)


def expand(text: str, tokens: Mapping[str, str]) -> str:
    """ssh's %-tokens; one that is not known stays as it is."""
    return re.sub("%(.)", lambda match: tokens.get(match[1], match[0]), text)


def expand_in_shell(command: str, tokens: Mapping[str, str]) -> str:
    """The same in a command for a shell, with each value quoted for its place: bare, or inside the quotes of the user.

    ssh does not quote. It only refuses names with the worst characters, and so do we (model/config/hosts.py).
    """
    made, quote, at = "", "", 0
    while at < len(command):
        letter, token = command[at], tokens.get(command[at + 1 : at + 2])
        if letter == "%" and token is not None:
            made += _quoted(token, quote)
            at += 2
            continue
        if letter == "\\" and quote != "'":
            letter = command[at : at + 2]
        elif letter in ("'", '"') and quote in ("", letter):
            quote = "" if quote else letter
        made += letter
        at += len(letter)
    return made


def _quoted(value: str, quote: str) -> str:
    """`value` inside quotes of this kind of a shell's command, "" for none."""
    if quote == "'":
        return value.replace("'", "'\\''")
    return re.sub(r'([\\$`"])', r"\\\1", value) if quote else shlex.quote(value)


# ---- ssh's configuration files


@dataclass(frozen=True)
class _Config:
    """The user's and the system's configuration as one text, and the hosts that it mentions."""

    text: str
    patterns: tuple[tuple[str, ...], ...]

    def matters(self, name: str) -> bool:
        return any(_matches(name, patterns) for patterns in self.patterns)


def _asked(name: str, user: str, port: int) -> Mapping[str, list[str]]:
    """The configuration of `name`: keyword in small letters -> values. Empty if there is none."""
    config = _read_config(home(), SYSTEM_CONFIG, _stamps())
    if not config.matters(name):
        return {}
    with _one_at_a_time.setdefault(name, threading.Lock()):  # a hundred nodes ask for the same bastion
        return _lookup(config, name, user, port)


def _stamps() -> tuple[int, ...]:
    """Changes when a configuration file or its mode does: one process may be a long test run."""
    stamps = []
    for path in (os.path.join(home(), ".ssh", "config"), SYSTEM_CONFIG):
        try:
            stamps.append(os.stat(path).st_ctime_ns)
        except OSError:
            stamps.append(0)
    return tuple(stamps)


@functools.lru_cache(maxsize=8)
def _read_config(user_home: str, system: str, stamps: tuple[int, ...]) -> _Config:
    lines: list[str] = []
    for path in (os.path.join(user_home, ".ssh", "config"), system):
        lines += ["Host *", *_lines(path, os.path.dirname(path), "Host *", 0, path != system)]
    patterns: dict[tuple[str, ...], None] = {}
    block: tuple[str, ...] = ("*",)
    for line in lines:
        keyword, value = _split(line)
        if keyword == "host":
            block = tuple(value.replace('"', "").split())
        elif keyword == "match":  # only ssh can evaluate which hosts it matches
            block = ("*",)
            patterns[block] = None
        elif keyword in _MATTERS:
            patterns[block] = None
    return _Config("\n".join(lines) + "\n", tuple(patterns))


def _lines(path: str, base: str, block: str, depth: int, checked: bool) -> Iterator[str]:
    """The lines of a configuration file with those of its Includes in their place. `block` is the Host line in force.

    checked: raise ConfigError if another user can have written it. As with ssh, that is asked of the user's file and of
    every Include, but not of the system's own file.
    """
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            problem = ownership.problem(file.fileno(), os.fstat(file.fileno())) if checked else ""
            lines = file.read().splitlines()
    except OSError:
        return
    if problem:
        raise ConfigError(
            f"{path} is not obeyed, and ssh would not obey it either: it {problem}",
            f"make it yours alone: chown {local_user()} {path}; chmod 600 {path}",
        )
    for line in lines:
        keyword, value = _split(line)
        if keyword in ("host", "match"):
            block = line
        if keyword != "include":
            yield _in_our_home(line) if keyword in _PATHS else line
        elif depth < 16:
            for pattern in value.replace('"', "").split():
                for included in sorted(glob.glob(os.path.join(base, _expand_home(pattern)))):
                    yield from _lines(included, base, block, depth + 1, True)
            yield block  # the lines after an Include belong to the block around it


def _in_our_home(line: str) -> str:
    """ssh expands `~` to the home of the password file; the tool uses $HOME (tests and containers have another one)."""
    return re.sub(r"(?<=[\s=\"])~/", lambda _: home() + "/", line)


def _split(line: str) -> tuple[str, str]:
    match = re.match(r"\s*([A-Za-z]+)\s*[=\s]\s*(.*?)\s*$", line)
    return (match[1].lower(), match[2]) if match else ("", "")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """ssh's Host line: one pattern fits, and no negated one does."""
    name, found = name.lower(), False
    for pattern in patterns:
        fits = fnmatch.fnmatchcase(name, pattern.lstrip("!").lower().replace("[", "[[]"))
        if fits and pattern.startswith("!"):
            return False
        found = found or fits
    return found


_one_at_a_time: dict[str, threading.Lock] = {}


@functools.lru_cache(maxsize=4096)
def _lookup(config: _Config, name: str, user: str, port: int) -> Mapping[str, list[str]]:
    ssh = shutil.which("ssh")
    if not ssh:
        return _lookup_paramiko(config, name)
    argv = [
        ssh,
        "-G",
        "-F",
        "/dev/stdin",
        *(["-l", user] if user else []),
        *(["-p", str(port)] if port else []),
        "--",
        name,
    ]
    try:
        done = subprocess.run(
            argv,
            input=config.text.encode("utf-8", "surrogateescape"),
            capture_output=True,
            timeout=_SPAWN_LIMIT,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"`ssh -G {name}` does not end", "look for `Match exec` in ~/.ssh/config", name) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().replace("/dev/stdin", "~/.ssh/config with its Includes")
        raise ConfigError(f"ssh does not accept its configuration: {said}", f"run: ssh -G {name}", name)
    answers: dict[str, list[str]] = {}
    for line in done.stdout.decode("utf-8", "surrogateescape").splitlines():
        keyword, _, value = line.partition(" ")
        answers.setdefault(keyword, []).append(value)
    return answers


def _lookup_paramiko(config: _Config, name: str) -> Mapping[str, list[str]]:
    """The same without an ssh client; paramiko expands tokens and `~` of other values itself."""

    class Careful(SSHConfig):  # type: ignore[misc]
        """ProxyCommand stays as it is, as from `ssh -G`; a command of Match gets its tokens quoted."""

        TOKENS_BY_CONFIG_KEY = {**SSHConfig.TOKENS_BY_CONFIG_KEY, "proxycommand": []}

        def _tokenize(self, config: object, host: str, key: str, value: str) -> str:
            expanded = super()._tokenize
            if key != "match-exec":
                return str(expanded(config, host, key, value))
            tokens = {letter: str(expanded(config, host, key, f"%{letter}")) for letter in re.findall("%(.)", value)}
            return expand_in_shell(value, tokens)

    try:
        said = Careful.from_text(config.text).lookup(name)
    except ConfigParseError as error:
        fix = "correct it, or set what is needed in conf.py"
        raise ConfigError(f"~/.ssh/config cannot be read: {error}", fix, name) from None
    answers = {key: value if isinstance(value, list) else [str(value)] for key, value in said.items() if value}
    answers.setdefault("identityfile", sorted(_DEFAULT_LINES))
    return answers
