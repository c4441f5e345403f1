#!/bin/sh
# Trains word2vec on the embedded local cluster and takes the cluster down, whatever happens; exits with the run's code.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
tool=$root/.venv/bin/clustertool
export XDG_STATE_HOME="$root/.demo" # a cluster of its own: one that you run for yourself is not touched
trap : INT TERM                     # Ctrl+C is for the run, which stops its job; we stay and clean up
cd /                                # a conf.py is searched upwards: from here none is found, even if this project has one

"$tool" run --workspace "$root/workspaces/word2vec"
code=$?
"$tool" cluster.down || { down=$?; [ $code != 0 ] || code=$down; }
exit $code
