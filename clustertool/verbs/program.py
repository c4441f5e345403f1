"""The `clustertool` command has the verbs without a tasks.py and without Invoke, with its own parser, help and completion.

A shell waits for completed job ids and hosts, so nothing is run and no node is asked. Jobs are those that were started
from this machine. Hosts are those of HOSTS in conf.py if it is a plain list: conf.py is read and not executed. Without
such a list they are those of the newest job.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clustertool import __version__
from clustertool.actions import conf_file
from clustertool.cli import completion, help_text, parser
from clustertool.cli.options import Positional, Verb
from clustertool.cli.verb_table import ABOUT, COMMON, EXAMPLES, HELP, VERBS
from clustertool.errors import ClustertoolError, UsageError
from clustertool.fleet import this_user
from clustertool.model.config.hosts import read_hosts, valid_host
from clustertool.model.paths import is_job_id

_NAMES = tuple(verb.name for verb in VERBS)
_LAUNCHER = "clusterrun"  # a program of its own, with the options of launchers
# Answered here, without the modules that run verbs.
_COMMAND = Positional("commands", "[COMMAND]", "the command", choices=(*_NAMES, _LAUNCHER))
_ABOUT_HELP = "Show the commands, or the options of one."
_HELP = Verb("help", _ABOUT_HELP, purpose="Help", examples=("help run",), positional=_COMMAND)
_ALL = (*VERBS, _HELP)
_MOST_FILES = 32  # files of jobs
_LARGEST_FILE = 64 << 10  # bytes of a file of which more than its name is read


def main() -> None:
    """Run the command line of this program, and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Parse a command line, without the program's name, and complete, print help, or run a verb. Returns the exit code.

    A command line that is not valid is reported as an error.
    """
    if argv[:2] == ["--complete", "--"]:
        return _print_text("\n".join(_candidates(argv[2:])))
    try:
        line = parser.read(argv, _ALL, COMMON, HELP)
        text = _help_answer(line)
    except UsageError as error:
        return int(importlib.import_module("clustertool.verbs.verb").report_usage_error(error, "--json" in argv))
    if text is not None:
        return _print_text(text)
    return int(importlib.import_module("clustertool.verbs.verb").run(line.verb, line.given, line.common["dry"]))


def _candidates(tokens: Sequence[str]) -> list[str]:
    """List the candidates that the last token may become. The first token is clustertool or clusterrun."""
    if os.path.basename(tokens[0] if tokens else "") != _LAUNCHER:
        return completion.candidates(tokens, _ALL, COMMON, HELP, _completion_values)
    known = importlib.import_module("clustertool.cli.launchers.foreign_options").spellings()
    return completion.launcher_candidates(tokens, known, _completion_values)


def _completion_values(kind: str) -> list[str]:
    """List the values for completion that help calls by this name (JOB, HOST); [] for others."""
    find = _VALUES.get(kind)
    return find() if find else []


def _help_answer(line: parser.CommandLine) -> str | None:
    """Build the text of help, a version or a list, if the command line asks for one; None if it runs a verb.

    The help of clusterrun is printed here: "". Raises UsageError for help about two commands or an unknown one, a completion
    script for an unknown shell, and --dry without a command.
    """
    common, verb, width = line.common, line.verb, shutil.get_terminal_size().columns
    asked = line.given.pop("commands", ())
    if len(asked) > 1:
        raise UsageError(f"help takes one command, not {len(asked)}", "clustertool --help lists the commands")
    if asked == (_LAUNCHER,):
        importlib.import_module("clustertool.verbs.clusterrun").show_help()
        return ""
    if asked:
        verb = parser.find(asked[0], _ALL)
    if verb is not None and (asked or common["help"]):
        return help_text.of_verb(verb, (HELP,), width)
    if common["version"]:
        return f"clustertool {__version__}"
    if common["list"]:
        return help_text.listing(_ALL)
    shell = common["print_completion_script"]
    if shell and shell not in completion.SCRIPTS:
        what = f"--print-completion-script {shell!r}: there is none for this shell"
        raise UsageError(what, f"one of {', '.join(completion.SCRIPTS)}")
    if shell:
        return completion.SCRIPTS[shell].rstrip("\n")
    if verb is None and common["dry"]:
        raise UsageError("--dry without a command", "clustertool --help lists the commands")
    return help_text.overview(ABOUT, _ALL, COMMON, EXAMPLES, width) if verb in (None, _HELP) else None


def _print_text(text: str) -> int:
    """Print a text on stdout and return the exit code: 0, also if the reader has left (`| head`); EX_IOERR for other errors."""
    if sys.stdout is None:  # started with a closed stdout
        return 0
    try:
        sys.stdout.write(text + "\n" * bool(text))
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes again when it exits
        if not isinstance(error, BrokenPipeError):
            print(f"clustertool: cannot write to stdout: {error.strerror}", file=sys.stderr)
            return os.EX_IOERR
    return 0


def job_names() -> list[str]:
    """List the ids of the jobs that were started from this machine, newest first, and after them names of the newest 32.

    Names are those of --job-id and --name. Each is listed once.
    """
    files = _stored_jobs()[::-1]
    contents = map(_stored_job, files[:_MOST_FILES])
    names = [str(content.get(key, "")) for content in contents for key in ("asked", "name")]
    return list(dict.fromkeys([*map(this_user.job_of_file, files), *filter(is_job_id, names)]))


def host_names() -> list[str]:
    """List the names of the hosts in conf.py, or without a plain list there, of the newest stored job."""
    named = _hosts_of_conf()
    for path in _stored_jobs()[-1:] if not named else ():
        with contextlib.suppress(TypeError, KeyError):
            named = [str(host["name"]) for host in _stored_job(path).get("hosts", ())]
    return [name for name in dict.fromkeys(named) if valid_host(name)]


# By what help calls the value.
_VALUES: Mapping[str, Callable[[], list[str]]] = {"JOB": job_names, "HOST": host_names}


def _stored_jobs() -> list[Path]:
    """List the files of stored jobs, the oldest first; none for a user without a home folder."""
    with contextlib.suppress(ClustertoolError):
        return this_user.job_files_by_age(this_user.jobs_folder())
    return []


def _stored_job(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file; {} if it is large, cannot be read, or is something else."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        if path.stat().st_size <= _LARGEST_FILE:
            found = json.loads(path.read_bytes())
            return found if isinstance(found, dict) else {}
    return {}


def _hosts_of_conf() -> list[str]:
    """List the names in HOSTS of the nearest conf.py if it is a plain list, without running the file; else []."""
    with contextlib.suppress(OSError, ValueError, SyntaxError, RecursionError, MemoryError, ClustertoolError):
        path = conf_file.find_conf("")
        for line in ast.parse(path.read_bytes()).body if path else ():
            if isinstance(line, ast.Assign) and [ast.unparse(target) for target in line.targets] == ["HOSTS"]:
                return [host.name for host in read_hosts(ast.literal_eval(line.value))]
    return []
