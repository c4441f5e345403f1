"""clustertool secret makes the secret of machines on which the same command is typed (docs/without-ssh.md)."""

from __future__ import annotations

from clustertool.errors import DataError, UsageError
from clustertool.fleet import this_user
from clustertool.fleet.joining import secret
from clustertool.model.launcher_variables import SECRET
from clustertool.verbs.verb import Call


def new_secret(call: Call) -> None:
    """Print a new secret on stdout or write it to --to, a new file with mode 0600, and print where machines read it.

    Makes missing folders above the file. Raises UsageError if the file exists, DataError if it cannot be written.
    """
    text, to, named = secret.new(), call.given.to, this_user.shorten_home(secret.default_file())
    if not to:
        if call.json:
            call.answer({"secret": text})
        else:
            call.terminal.line(text)
        call.terminal.note(f"put it on each machine: into {SECRET}, or into {named} with mode 0600")
        return
    path = this_user.expand_home(to)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        secret.write(path, text)
    except FileExistsError:
        fix = "remove it first if no machine needs it any more, or name another file"
        raise UsageError(f"{path} exists", fix) from None
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror}", "name a file in a folder of yours") from None
    call.answer({"file": str(path)})
    read = path.resolve() == secret.default_file().resolve()
    where = "clusterrun reads it there" if read else f"clusterrun reads {named}"
    call.terminal.note(f"{path} has a new secret; {where}; copy it to each machine with mode 0600")
