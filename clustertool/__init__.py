"""clustertool runs distributed training jobs on plain Linux machines over SSH."""

__version__ = "0.1.0"
