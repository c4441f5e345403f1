#!/bin/sh
# Makes .frameworks/NAME for each NAME given: a virtual environment with what workspaces/NAME/requirements.txt asks for.
# What is there already is kept until that file changes. PyTorch is the CPU's build, which PyPI lacks for Linux: where it
# can't be had, or nothing can be had at all, that is reported and the tests skip, unless DEMAND_FRAMEWORKS=1. Then any build
# will do, and to have none is an error.
set -u
cd "$(dirname "$0")/.."

demanded() { [ "${DEMAND_FRAMEWORKS:-0}" = 1 ]; }

make_venv() { # name, further requirements
    name=$1 venv=.frameworks/$1
    shift
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv" &&
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
            --requirement "workspaces/$name/requirements.txt" "$@" &&
        cp "workspaces/$name/requirements.txt" "$venv/.ready"
}

code=0
mkdir -p .frameworks
for name in "$@"; do
    wanted=workspaces/$name/requirements.txt log=.frameworks/$name.log
    cmp -s "$wanted" ".frameworks/$name/.ready" && continue
    cpu=
    [ "$(uname -s)" = Linux ] && cpu=$(sed -n 's/^torch==.*/&+cpu/p' "$wanted")
    echo "making .frameworks/$name" >&2
    make_venv "$name" $cpu >"$log" 2>&1 && continue
    if demanded; then
        [ -n "$cpu" ] && make_venv "$name" >"$log" 2>&1 && continue
        code=1
    fi
    echo "no .frameworks/$name: $(grep -i error "$log" | tail -n 1)" >&2
done
exit $code
