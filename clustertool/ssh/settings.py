"""Settings define how one host is reached: by conf.py, then ssh's configuration, then ssh's defaults. Nothing is opened here.

`ssh -G` reads the configuration, and refuses files that another user can have written. One call takes 4 ms of CPU, so
that one answer serves all hosts if no line of the configuration depends on the host. Without an ssh client paramiko
reads the files.
"""

from __future__ import annotations

import functools
import glob
import os
import pwd
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import paramiko.config
from paramiko.config import SSHConfig
from paramiko.ssh_exception import ConfigParseError

from clustertool.errors import ConfigError
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host, read_hosts
from clustertool.node.system import users
from clustertool.ssh import ownership

SYSTEM_CONFIG = "/etc/ssh/ssh_config"
SYSTEM_KNOWN_HOSTS = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa", "id_ed25519_sk", "id_ecdsa_sk")
_DEFAULT_LINES = {f"~/.ssh/{name}" for name in (*DEFAULT_KEYS, "id_dsa", "id_xmss")}
_SPAWN_LIMIT = 20.0  # seconds for `ssh -G`; a `Match exec` of the user's runs inside
_HOPS_LIMIT = 8

# A line that can make hosts differ: Host (but with the pattern *), Match, HostName, Canonicalize..., a %-token.
_DEPENDS = re.compile(
    rb'^(?![ \t]*#)[ \t]*"?(?:host(?:name)?(?![a-z])(?!["\s=]+\*"?\s*$)|match|canonical|[^\n]*%)',
    re.IGNORECASE | re.MULTILINE,
)
_ANY_HOST = "localhost"  # stands for all hosts
_READING = "debug1: Reading configuration data "
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
    certificate_files: tuple[str, ...] = ()
    agent: str = ""  # the agent's socket, "" for none
    proxy_command: str = ""
    gateways: tuple[SshSettings, ...] = ()
    host_key_name: str = ""  # the host's name in known_hosts
    host_keys: str = "accept-new"
    known_hosts: tuple[str, ...] = ()  # a new key is appended to the first one
    system_known_hosts: tuple[str, ...] = ()
    revoked_host_keys: str = ""  # a list of keys, or a KRL
    connect_timeout: float = 10.0
    gateway: bool = False  # a jump host, not a node
    listed: str = "HOSTS"  # what names it


def settings(host: Host, cluster: Cluster) -> SshSettings:
    """Find how to reach `host`, and its gateways. Raises ConfigError if ssh's configuration or GATEWAY cannot be read.

    GATEWAY of conf.py replaces ProxyJump and ProxyCommand. It is a list of gateways, a command if it has a blank, or "none".
    """
    found = _settings_of_host(host, cluster, cluster.user, cluster.port)
    if cluster.gateway and cluster.gateway.lower() != "none":
        if " " in cluster.gateway.strip():
            return replace(found, proxy_command=cluster.gateway.strip(), gateways=())
        return replace(found, proxy_command="", gateways=_parse_gateways(cluster.gateway, found, cluster, 0))
    return replace(found, proxy_command="", gateways=()) if cluster.gateway else found


def check() -> None:
    """Raise ConfigError if ssh does not accept its configuration. No connection is opened."""
    files = _files()
    if files:
        _for_all_hosts(files)


def home() -> str:
    """Return this user's home folder, / without one, as sshd does: a relative path would be one of the current folder."""
    return users.home() or "/"


def _settings_of_host(host: Host, cluster: Cluster, user: str, port: int, depth: int = 0) -> SshSettings:
    """Find the settings of one host, and its gateways by ProxyJump. Raises ConfigError as settings() does.

    user, port: of conf.py; the host's own have priority over them, and they over ssh's configuration. depth: jumps so far.
    """
    user, port = host.user or user, host.port or port
    answers = {} if cluster.ssh_config == "none" else _answers_for(host.host, user, port)
    user = user or _first_value(answers, "user") or users.own_name()
    port = port or int(_first_value(answers, "port") or 22)
    hostname = _first_value(answers, "hostname") or host.host
    known = tokens(host.host, hostname, user, port)
    keys, given = _identities(host.identity_file or cluster.identity_file, answers, known)
    found = SshSettings(
        name=host.name or host.host,
        listed=host.listed,
        hostname=hostname,
        user=user,
        port=port,
        identity_files=keys,
        identities_given=given,
        identities_only=_first_value(answers, "identitiesonly") == "yes",
        certificate_files=_paths(answers, "certificatefile", known),
        agent=_agent(answers),
        proxy_command=_first_value(answers, "proxycommand"),
        host_key_name=_key_name(answers, hostname, port),
        host_keys=_host_key_policy(cluster, answers),
        known_hosts=_known_hosts(cluster, answers),
        system_known_hosts=tuple(_all_values(answers, "globalknownhostsfile")) or SYSTEM_KNOWN_HOSTS,
        revoked_host_keys=next(iter(_paths(answers, "revokedhostkeys", known)), ""),
        connect_timeout=cluster.connect_timeout,
    )
    jump = _first_value(answers, "proxyjump")
    return replace(found, gateways=_parse_gateways(jump, found, cluster, depth), proxy_command="") if jump else found


def _parse_gateways(text: str, to: SshSettings, cluster: Cluster, depth: int) -> tuple[SshSettings, ...]:
    """Parse "a,user@b:2222", and return the settings of the jump hosts in order, the one next to us first.

    Returns () for a host that would be its own gateway: it is reached directly. Raises ConfigError for a gateway of another
    form, for settings of one that cannot be read, and for a loop.
    """
    if depth > _HOPS_LIMIT:
        raise ConfigError(f"the gateways of {to.name} form a loop", "check ProxyJump in ~/.ssh/config", to.name)
    hops: list[SshSettings] = []
    for item in text.split(","):
        jump = _parse_gateway(item.strip())
        if jump.host in (to.name, to.hostname) and jump.port in (0, to.port):
            return ()
        hop = _gateway(jump, cluster, depth + 1)
        if (hop.hostname, hop.port) == (to.hostname, to.port):
            return ()
        if not hops:
            hops += [*hop.gateways, replace(hop, gateways=())]
        else:
            hops.append(replace(hop, gateways=(), proxy_command=""))
    return tuple(hops)


def _gateway(hop: Host, cluster: Cluster, depth: int) -> SshSettings:
    """Find the settings of a jump host. conf.py describes the nodes, so ssh's configuration has priority here.

    USER of conf.py counts if neither `hop` nor ssh has one, and its IDENTITY_FILE is tried after those of ssh.
    """
    found = _settings_of_host(hop, replace(cluster, identity_file=""), "", 0, depth)
    if not hop.user and cluster.user and found.user == users.own_name():
        found = replace(found, user=cluster.user)
    if cluster.identity_file:
        theirs = found.identity_files if found.identities_given else ()
        found = replace(found, identity_files=(*theirs, _expand_home(cluster.identity_file)), identities_given=True)
    return replace(found, gateway=True)


def _parse_gateway(item: str) -> Host:
    """Parse a jump host, which is written like an entry of HOSTS, without ranges. Raises ConfigError for another form."""
    try:
        (host,) = read_hosts([item])
    except (ConfigError, ValueError):
        raise ConfigError(f"the gateway {item!r} is not right", _FIX_HOP) from None
    return host


# ---- the values of single settings


def _first_value(answers: _Answers, key: str) -> str:
    """Return the first value of a keyword; "" for none, and for the value "none"."""
    value = (answers.get(key) or [""])[0]
    return "" if value.lower() == "none" else value


def _all_values(answers: _Answers, key: str) -> list[str]:
    """List the arguments of all lines of a keyword as paths, with ~ expanded, without "none"."""
    return [_expand_home(item) for value in answers.get(key, ()) for item in value.split() if item.lower() != "none"]


def _identities(identity_file: str, answers: _Answers, known: Mapping[str, str]) -> tuple[tuple[str, ...], bool]:
    """Return (the key files to try, whether they were configured): conf.py's `identity_file` alone, else those of ssh.

    If ssh has none configured: its default names, and False.
    """
    if identity_file:
        return (_expand_home(identity_file),), True
    lines = answers.get("identityfile", ())
    named = [line for line in lines if line not in _DEFAULT_LINES]
    if named or (lines and len(lines) < 3):  # ssh -G prints all the default names if none is configured
        return _paths(answers, "identityfile", known), True
    return tuple(os.path.join(home(), ".ssh", name) for name in DEFAULT_KEYS), False


def _paths(answers: _Answers, key: str, known: Mapping[str, str]) -> tuple[str, ...]:
    """List the values of a keyword as paths, one in a line, with `~`, %-tokens and ${NAME} expanded, without "none"."""

    def replaced(found: re.Match[str]) -> str:
        return known.get(found[1], found[0]) if found[1] else os.environ.get(found[2], found[0])

    lines = (line for line in answers.get(key, ()) if line.lower() != "none")
    return tuple(_expand_home(re.sub(r"%(.)|\$\{(\w+)\}", replaced, line)) for line in lines)


def tokens(name: str, hostname: str, user: str, port: int) -> dict[str, str]:
    """Return the values of ssh's %-tokens, {letter: value}, for the path of a file or a command."""
    own = {"d": home(), "u": users.own_name(), "i": str(os.getuid()), "l": socket.gethostname(), "%": "%"}
    return {**own, "h": hostname, "n": name, "r": user, "p": str(port)}


def _agent(answers: _Answers) -> str:
    """Return the socket of the agent: of IdentityAgent, a path or $VARIABLE, else of SSH_AUTH_SOCK; "" for none."""
    usual = os.environ.get("SSH_AUTH_SOCK", "")
    value = (answers.get("identityagent") or ["SSH_AUTH_SOCK"])[0]
    if value.lower() == "none":
        return ""
    if value.startswith("$"):
        return os.environ.get(value[1:].strip("{}"), "")
    return usual if value == "SSH_AUTH_SOCK" else _expand_home(value)


def _host_key_policy(cluster: Cluster, answers: _Answers) -> str:
    """Return conf.py's HOST_KEYS; "strict" in place of "accept-new" where ssh has StrictHostKeyChecking=yes for the host."""
    careful = _first_value(answers, "stricthostkeychecking") in ("true", "yes")
    return "strict" if careful and cluster.host_keys == "accept-new" else cluster.host_keys


def _known_hosts(cluster: Cluster, answers: _Answers) -> tuple[str, ...]:
    """List the user's known_hosts files: of conf.py, else of UserKnownHostsFile, else ssh's default names below $HOME."""
    if cluster.known_hosts:
        return (_expand_home(cluster.known_hosts),)
    usual = tuple(os.path.join(home(), ".ssh", name) for name in ("known_hosts", "known_hosts2"))
    if "userknownhostsfile" not in answers:
        return usual
    files = tuple(_all_values(answers, "userknownhostsfile"))
    passwd = os.path.join(_passwd_home(), ".ssh")  # ssh's defaults are there, the tool's in $HOME
    return usual if files == (f"{passwd}/known_hosts", f"{passwd}/known_hosts2") else files


def _key_name(answers: _Answers, hostname: str, port: int) -> str:
    """Return the name of a host in known_hosts: HostKeyAlias as it is, else the address, with the port unless it is 22."""
    alias = _first_value(answers, "hostkeyalias")
    return alias or (hostname.lower() if port == 22 else f"[{hostname.lower()}]:{port}")


def _account() -> pwd.struct_passwd | None:
    """Return this user's entry of the password file; None without one, as in a container."""
    try:
        return pwd.getpwuid(os.getuid())
    except KeyError:
        return None


def _passwd_home() -> str:
    """Return the home folder of the password file; without an entry there, that of home()."""
    account = _account()
    return account.pw_dir if account else home()


def _expand_home(path: str) -> str:
    """Remove quotation marks around a path, and expand ~ in front, by $HOME for this user."""
    path = path.strip('"')
    return os.path.join(home(), path[2:]) if path.startswith("~/") else os.path.expanduser(path)


def expand_in_shell(command: str, tokens: Mapping[str, str]) -> str:
    """Expand ssh's %-tokens in a command for a shell, each value quoted for its place: bare, or inside the quotes of the user.

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
    """Quote `value` for its place in a shell's command. quote: the quotation mark around the place, "" for none."""
    if quote == "'":
        return value.replace("'", "'\\''")
    return re.sub(r'([\\$`"])', r"\\\1", value) if quote else shlex.quote(value)


# ---- ssh's configuration files

_File = tuple[str, int]  # path, time of the last change: one process may be a long test run
_Answers = Mapping[str, list[str]]  # keyword in small letters -> values


def _files() -> tuple[_File, ...]:
    """List the files of the user's and the system's configuration that can be read, with the times of their last changes."""
    paths = (os.path.join(home(), ".ssh", "config"), SYSTEM_CONFIG)
    return tuple((path, os.stat(path).st_ctime_ns) for path in paths if os.access(path, os.R_OK))


def _answers_for(name: str, user: str, port: int) -> _Answers:
    """Read the answers of ssh's configuration for a host, {keyword: values}; {} without a configuration."""
    files = _files()
    if not files:
        return {}
    answers = _for_all_hosts(files)
    if answers is not None:
        return answers
    with _one_at_a_time.setdefault(name, threading.Lock()):  # a hundred nodes ask for the same bastion
        return _for_host(files, name, user, port)


@functools.lru_cache(maxsize=8)
def _for_all_hosts(files: tuple[_File, ...]) -> _Answers | None:
    """Read the answers that hold for every host; None if they may depend on the host, or there is no ssh client.

    Raises ConfigError for a configuration that ssh refuses.
    """
    if not _has_client():
        _read_without_client(files)
        return None
    answers, read = _run_ssh(files, _ANY_HOST, ["-v"])
    try:
        if any(_DEPENDS.search(Path(path).read_bytes()) for path in read):
            return None
    except OSError:  # ssh shows letters outside ASCII in the path of a file as numbers
        return None
    return {key: values for key, values in answers.items() if key not in ("host", "hostname", "originalhost")}


@functools.lru_cache(maxsize=4096)
def _for_host(files: tuple[_File, ...], name: str, user: str, port: int) -> _Answers:
    """Read the answers for one host, with ssh or without it, and remember them."""
    if not _has_client():
        return _lookup_paramiko(_read_without_client(files), name)
    options = [*(["-l", user] if user else []), *(["-p", str(port)] if port else [])]
    return _run_ssh(files, name, options)[0]


def _has_client() -> bool:
    """Check that ssh can be run: that it is installed, and that this user has an entry in the password file, as it requires."""
    return bool(_account() and shutil.which("ssh"))


_one_at_a_time: dict[str, threading.Lock] = {}


def _run_ssh(files: tuple[_File, ...], name: str, options: list[str]) -> tuple[_Answers, list[str]]:
    """Run `ssh -G`, and return ({keyword: values}, the files that it read if `options` has -v, else []).

    Raises ConfigError if ssh refuses its configuration, or does not end in 20 s. ssh reads the configuration in the home of the
    password file. With another $HOME (in tests, in containers) it gets a file that includes the configuration of that home, and
    checks it as strictly.
    """
    argv = ["ssh", "-G", *options]
    node = "" if name == _ANY_HOST else name
    try:
        with tempfile.NamedTemporaryFile() as includes:
            if os.path.realpath(home()) != os.path.realpath(_passwd_home()):
                includes.writelines(os.fsencode(f'Include "{glob.escape(path)}"\n') for path, _ in files)
                includes.flush()
                argv += ["-F", includes.name]
            argv += ["--", name]
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SPAWN_LIMIT, start_new_session=True
            )
    except subprocess.TimeoutExpired:
        fix = "correct the command of `Match exec` in ~/.ssh/config"
        raise ConfigError(f"`ssh -G {name}` does not end", fix, node) from None
    errors = done.stderr.decode("utf-8", "surrogateescape").splitlines()
    if done.returncode:
        what = "; ".join(line.strip() for line in errors if not line.startswith(("debug", "OpenSSH")))
        fix = f"correct the file, or its owner and mode (chmod 600); `ssh -G {name}` shows the error"
        raise ConfigError(f"ssh does not accept its configuration: {what}", fix, node)
    answers: dict[str, list[str]] = {}
    for line in done.stdout.decode("utf-8", "surrogateescape").splitlines():
        keyword, _, value = line.partition(" ")
        answers.setdefault(keyword, []).append(value)
    read = [line[len(_READING) :] for line in errors if line.startswith(_READING)]
    return answers, [path for path in read if path != includes.name]


def _read_without_client(files: tuple[_File, ...]) -> str:
    """Read the texts of the configuration's files, joined. Raises ConfigError for what only ssh can read (Include).

    Raises it, too, for a file that another user can have written, which ssh would refuse.
    """
    lines: list[str] = []
    for path, _ in files:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            problem = ownership.problem(file.fileno(), os.fstat(file.fileno())) if path != SYSTEM_CONFIG else ""
            lines += ["Host *", *file.read().splitlines()]
        if problem:
            fix = f"make it yours alone: chown {users.own_name()} {path}; chmod 600 {path}"
            raise ConfigError(f"{path} {problem}", fix)
        for line in lines:
            include = re.match(r"\s*include[\s=]+(.*)", line, re.IGNORECASE)
            for pattern in include[1].replace('"', "").split() if include else ():
                if glob.glob(os.path.join(os.path.dirname(path), _expand_home(pattern))):
                    raise ConfigError(f"{path} has an Include, which only ssh can read", "install the OpenSSH client")
    return "\n".join(lines) + "\n"


def _lookup_paramiko(text: str, name: str) -> _Answers:
    """Find the answers for a host by paramiko, without an ssh client. Raises ConfigError for a text that it cannot parse.

    paramiko expands tokens and `~` of most values itself.
    """

    class Careful(SSHConfig):  # type: ignore[misc]
        """ProxyCommand stays as it is, as from `ssh -G`; a command of Match gets its tokens quoted."""

        TOKENS_BY_CONFIG_KEY = {**SSHConfig.TOKENS_BY_CONFIG_KEY, "proxycommand": []}

        def _tokenize(self, config: object, host: str, key: str, value: str) -> str:
            """Expand tokens as paramiko does; in a command of Match, quote their values for the shell."""
            expanded = super()._tokenize
            if key != "match-exec":
                return str(expanded(config, host, key, value))
            tokens = {letter: str(expanded(config, host, key, f"%{letter}")) for letter in re.findall("%(.)", value)}
            return expand_in_shell(value, tokens)

    # Its own getpass finds no name where the password file has no entry of this user; ssh does not run there at all.
    paramiko.config.getpass = SimpleNamespace(getuser=users.own_name)
    try:
        found = Careful.from_text(text).lookup(name)
    except ConfigParseError as error:
        fix = "correct it, or set what is needed in conf.py"
        raise ConfigError(f"~/.ssh/config cannot be read: {error}", fix, name) from None
    answers = {key: value if isinstance(value, list) else [str(value)] for key, value in found.items() if value}
    answers.setdefault("identityfile", sorted(_DEFAULT_LINES))
    return answers
