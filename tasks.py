"""The verbs a person types as `inv VERB`; those of this project's developers are under `dev.`."""

from invoke import Collection, Context, task

from clustertool.verbs import ns


@task
def test(c: Context) -> None:
    """All tests that run in minutes."""
    c.run("make test")


@task
def check(c: Context) -> None:
    """Style, types, and the arrows between the layers."""
    c.run("make check")


@task
def demo(c: Context) -> None:
    """Train word2vec on the embedded local cluster."""
    c.run("make demo")


ns.add_collection(Collection("dev", test, check, demo))
