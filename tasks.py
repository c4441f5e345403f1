"""This file has the verbs of `inv VERB`, and the tasks of developers under `dev.`."""

from invoke import Collection, Context, task

from clustertool.verbs import ns


@task
def test(c: Context) -> None:
    """Run all tests that take minutes."""
    c.run("make test")


@task
def check(c: Context) -> None:
    """Format, mistakes, types, imports and names."""
    c.run("make check")


@task
def demo(c: Context) -> None:
    """Train word2vec on the embedded local cluster."""
    c.run("make demo")


ns.add_collection(Collection("dev", test, check, demo))
