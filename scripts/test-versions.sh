#!/bin/sh
# Runs the tests of the laptop's side with each Python from 3.10 on that this machine has and the newest fabric, invoke and
# paramiko that setup.cfg allows, and once with the oldest of them, on the oldest Python. Arguments go to pytest; without any
# it runs tests/unit and tests/ssh.
set -u
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- tests/unit tests/ssh
if unshare --net true 2>/dev/null; then export OWN_LOOPBACK=1; fi
mkdir -p .versions
: >.versions/results

python_of() { # minor version
    for python in "$(command -v "python3.$1")" "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$1".*/bin/python3; do
        "$python" -c "import sys; sys.exit(sys.version_info[:2] != (3, $1))" 2>/dev/null && echo "$python" && return
    done
    return 1
}

installed() { # name, Python, further requirements
    venv=.versions/$1 python=$2
    shift 2
    { [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"; } &&
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
            --editable '.[test]' "$@"
}

result() { # name, outcome
    versions=$(".versions/$1/bin/python" -m pip list --format freeze 2>/dev/null | grep -E '^(fabric|invoke|paramiko)==')
    echo "$1: $2 ($(echo "$versions" | tr '\n' ' ' | sed 's/ $//; s/ /, /g'))" | tee -a .versions/results
}

code=0 oldest=$(sed -nE 's/^ +(fabric|invoke|paramiko)>=([0-9.]+).*/\1==\2/p' setup.cfg)
for minor in 10 11 12 13 14 15 16; do
    python=$(python_of "$minor") || continue
    for set in "${oldest:+oldest}" newest; do
        [ -n "$set" ] || continue
        name=3.$minor-$set
        [ "$set" = newest ] && oldest=
        echo "== $name" >&2
        if ! installed "$name" "$python" $oldest; then
            result "$name" "cannot be installed" && code=1
        elif ".versions/$name/bin/python" -m pytest -q "$@"; then
            result "$name" passed
        else
            result "$name" FAILED && code=1
        fi
    done
done
echo "== results"
cat .versions/results
exit $code
