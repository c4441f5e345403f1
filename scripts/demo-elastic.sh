#!/bin/sh
# Trains on four embedded nodes, kills one of them, and shows that the loss continues on the others; exits with the run's code.
set -u
root=$(cd "$(dirname "$0")/.." && pwd)
tool=$root/.venv/bin/clustertool python=$root/.venv/bin/python
export XDG_STATE_HOME="$root/.demo" # a cluster of its own: one that you run for yourself is not touched
cd /                                # a conf.py is searched upwards: from here none is found, even if this project has one

"$tool" cluster.down >/dev/null 2>&1
"$tool" cluster.up --nodes 4 || exit
trap 'kill -INT $run 2>/dev/null' INT TERM # Ctrl+C is for the run, which stops its job; we stay and clean up
"$tool" run --workspace "$root/workspaces/elastic" --nnodes 2:4 --script "train.py --steps 500" &
run=$!
victim=$("$python" "$root/scripts/demo_victim.py" "$tool" 100) && {
    echo "demo: killing the node 127.0.0.2: its sshd, and its part of the job" >&2
    kill -9 $victim
}
wait $run
code=$?
[ $code -lt 128 ] || { wait $run; code=$?; } # a signal has ended the first wait
"$tool" status
"$tool" cluster.down || { down=$?; [ $code != 0 ] || code=$down; }
exit $code
