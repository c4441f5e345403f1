"""How nodes join a job that no laptop starts: what each joining process gets, and what the coordinator decides."""
