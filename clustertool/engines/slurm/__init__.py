"""The engine slurm: jobs of Slurm's queue, whose nodes join by themselves."""
