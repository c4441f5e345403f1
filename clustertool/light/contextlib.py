"""What nodes need of `contextlib`: suppress and contextmanager, without the collections that it imports (2 ms)."""

from __future__ import annotations

from typing import Any, Callable


class suppress:
    def __init__(self, *kinds: Any) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        """Nothing to give."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return kind is not None and issubclass(kind, self._kinds)


class _Managed:
    def __init__(self, made: Any) -> None:
        self._made = made

    def __enter__(self) -> Any:
        return next(self._made)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        """Goes on behind the yield, or raises there; an error that comes back out of it as it was is the caller's."""
        try:
            if error is None:
                next(self._made)
            else:
                self._made.throw(error)
        except StopIteration as end:
            return end is not error
        except BaseException as other:
            if other is not error and not (isinstance(error, StopIteration) and other.__cause__ is error):
                raise
            return False
        raise RuntimeError("a context manager yielded twice")


def contextmanager(function: Callable[..., Any]) -> Callable[..., Any]:
    def managed(*arguments: Any, **named: Any) -> _Managed:
        return _Managed(function(*arguments, **named))

    return managed


def __getattr__(name: str) -> Any:
    import contextlib

    return getattr(contextlib, name)
