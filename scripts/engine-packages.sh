#!/bin/sh
# Installs what the tests of jobs in a queue use: Slurm's daemons and commands, and munge; and Open MPI and MPICH under the names
# that Debian gives them. Where that cannot be done, it prints what to install, and the tests skip; with DEMAND_ENGINES=1 it is an error.
cd "$(dirname "$0")" || exit 1
mpi=
command -v apt-get >/dev/null 2>&1 && mpi="mpirun.openmpi mpirun.mpich"
./system-packages.sh slurmctld slurmd sbatch munged $mpi || [ "${DEMAND_ENGINES:-0}" != 1 ]
