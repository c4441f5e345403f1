"""The engine slurm runs jobs in Slurm's queue, whose nodes join by themselves."""
