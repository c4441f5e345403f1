#!/bin/sh
# Installs what the tests of jobs in a queue and in containers use: Slurm's daemons and commands, and munge; Open MPI and MPICH under
# the names that Debian gives them; kubectl; etcd; podman with runc, and what it needs without root; docker. Where that cannot be done, it prints what to
# install, and the tests skip; with DEMAND_ENGINES=1 it is an error.
cd "$(dirname "$0")" || exit 1
code=0
mpi=
command -v apt-get >/dev/null 2>&1 && mpi="mpirun.openmpi mpirun.mpich"
./system-packages.sh slurmctld slurmd sbatch munged $mpi || code=1
./system-packages.sh kubectl || code=1
command -v apt-get >/dev/null 2>&1 && { ./system-packages.sh etcd etcdctl || code=1; }
./system-packages.sh podman runc conmon newuidmap || code=1
command -v dnf >/dev/null 2>&1 || ./system-packages.sh dockerd docker || code=1
[ "${DEMAND_ENGINES:-0}" != 1 ] || exit $code
