#!/bin/sh
# Makes .frameworks/NAME for each NAME given: a virtual environment with what workspaces/NAME/requirements.txt asks for.
# NAME+PACKAGE==VERSION+...: one with further packages, .frameworks/NAME+PACKAGE. What is there already is kept until that file or
# the version changes. PyTorch is the CPU's build, which PyPI lacks for Linux: where it can't be had, or nothing can be had at
# all, that is reported and the tests skip, unless DEMAND_FRAMEWORKS=1. Then any build will do, and to have none is an error.
set -u
cd "$(dirname "$0")/.."

demanded() { [ "${DEMAND_FRAMEWORKS:-0}" = 1 ]; }

make_venv() { # further requirements
    venv=.frameworks/$name
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv" &&
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile \
            --requirement "$wanted" "$@" &&
        echo "$content" >"$venv/.ready"
}

code=0
mkdir -p .frameworks
for recipe in "$@"; do
    name=${recipe%%==*}
    wanted=workspaces/${name%%+*}/requirements.txt log=.frameworks/$name.log
    case $recipe in *+*) more=$(echo "${recipe#*+}" | tr + ' ') ;; *) more= ;; esac
    content=$(cat "$wanted" && echo "$more")
    [ "$(cat ".frameworks/$name/.ready" 2>/dev/null)" = "$content" ] && continue
    cpu=
    [ "$(uname -s)" = Linux ] && cpu=$(sed -n 's/^torch==.*/&+cpu/p' "$wanted")
    echo "making .frameworks/$name" >&2
    make_venv $cpu $more >"$log" 2>&1 && continue
    if demanded; then
        [ -n "$cpu" ] && make_venv $more >"$log" 2>&1 && continue
        code=1
    fi
    echo "no .frameworks/$name: $(grep -i error "$log" | tail -n 1)" >&2
done
exit $code
