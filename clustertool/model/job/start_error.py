"""A rank's program that cannot be started has an exit code and a reason. This module has also the script for a prelude.

It is apart from outcome.py, which a probe does not need.
"""

from __future__ import annotations

import codecs
from typing import Tuple

_LINE_END = (
    r"its first line has a Windows line end, which is in the interpreter's name: remove it with sed -i 's/\r$//'"
)
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # as a shell has them


def not_started(error: OSError, program: str) -> Tuple[int, str]:
    """Return the exit code (126 or 127) and the reason for a program that could not be started.

    `program`: what the process was to run, if the error names no file.
    """
    what = error.filename if error.filename is not None else program
    code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    return code, f"cannot start {what!r}: {error.strerror}"


def wrong_first_line(start: bytes) -> str:
    """Describe what keeps the kernel from finding the interpreter of a script that begins so, and the fix; "" for nothing."""
    if start.startswith(codecs.BOM_UTF8 + b"#!"):
        return "a byte order mark is in front of its first line: save it as UTF-8 without the mark"
    first = start.split(b"\n", 1)[0]
    return _LINE_END if first.startswith(b"#!") and first.endswith(b"\r") else ""


def after_prelude(missing: str) -> str:
    """Build a shell script that runs the prelude, and then becomes the program that its arguments name.

    The prelude travels in the environment and not on the command line, where `ps` shows it. missing: the message about a
    program that is none, in double quotes of the shell, with $1 as its name: a shell's own would name the shell.
    """
    names = {"missing": missing, "line_end": _LINE_END, "not_executable": NOT_EXECUTABLE, "not_found": NOT_FOUND}
    return _AFTER_PRELUDE % names


# bash knows the command that failed. The trap on EXIT is for `exit` and `set -e` in the prelude: the program must not be
# skipped with exit code 0. Where a signal ends the shell, bash runs it too, and still ends by the signal.
_AFTER_PRELUDE = """\
ct_failed() {
    trap - EXIT
    case "${ct_line:-$CLUSTERTOOL_PRELUDE}" in
    *conda*|*mamba*) ct_fix="source PREFIX/etc/profile.d/conda.sh in a line before conda activate, and mamba.sh for mamba" ;;
    *module*|ml\\ *) ct_fix="source the file that defines module, such as /etc/profile.d/lmod.sh, in a line before" ;;
    *) ct_fix="try the lines of PRELUDE by hand, in: ssh NODE bash" ;;
    esac
    echo "clustertool: $2 with exit code $1${ct_line:+: $ct_line} (fix: $ct_fix)" >&2
    exit %(not_executable)d
}
trap 'ct_failed $? "the shell of PRELUDE ended before the program began,"' EXIT
[ -z "${BASH_VERSION-}" ] || trap 'case $BASH_COMMAND in *CLUSTERTOOL_PRELUDE*) ;; *) ct_line=$BASH_COMMAND ;; esac' ERR
eval "$CLUSTERTOOL_PRELUDE"
ct_code=$?
[ "$ct_code" = 0 ] || ct_failed "$ct_code" "PRELUDE failed"
trap - EXIT
[ -z "${BASH_VERSION-}" ] || trap - ERR
unset CLUSTERTOOL_PRELUDE ct_line ct_code
unset -f ct_failed
if ! command -v "$1" >/dev/null 2>&1; then
    echo "%(missing)s" >&2
    [ -e "$1" ] && exit %(not_executable)d
    exit %(not_found)d
fi
case $1 in
*/*)
    if [ -r "$1" ] && IFS= read -r ct_line <"$1"; then
        case $ct_line in
        '#!'*"$(printf '\\r')") printf '%%s\\n' "clustertool: cannot start $1: %(line_end)s" >&2; exit %(not_found)d ;;
        esac
    fi
    unset ct_line
    ;;
esac
exec "$@"
"""
