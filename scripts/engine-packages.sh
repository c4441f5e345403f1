#!/bin/sh
# Installs what the tests of jobs in a queue use: Slurm's daemons and commands, and munge. Where that cannot be done, it
# prints what to install, and the tests skip; with DEMAND_ENGINES=1 it is an error.
cd "$(dirname "$0")" || exit 1
./system-packages.sh slurmctld slurmd sbatch munged || [ "${DEMAND_ENGINES:-0}" != 1 ]
