"""clustertool runs distributed training jobs on plain Linux machines over SSH."""

from importlib import import_module

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Return a class of the Python API, as in `from clustertool import Cluster`. Nodes do not have it.

    Raises AttributeError for a name in small letters, as of a module.
    """
    if not name[:1].isupper():  # a module
        raise AttributeError(name)
    return getattr(import_module("clustertool.api"), name)
