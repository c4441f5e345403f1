"""The store of epochs, as a member of the job uses it: its loop never waits for the store.

A thread makes the requests. It writes nothing, starts no process and handles no signal, so the process may fork at any time.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections import deque
from typing import Callable, Deque, Optional

from clustertool.model.joining import store_rules as rules
from clustertool.model.joining.store_rules import Standing, StoreRecord
from clustertool.node.join.etcd.etcd_client import EtcdAccess, EtcdError
from clustertool.node.join.etcd.store_keeper import StoreJob, StoreKeeper, StoreView


class EpochStore:
    """turn() at any time. The other methods return at once, and are done in their order.

    A member that takes part in an epoch of another coordinator calls follow(). One that wants to coordinate calls campaign()
    and waits until the view's standing is not WAIT. It may have ranks until reachable_until (as a coordinator: valid_until).
    Raises EtcdError for a URL or a CA that is not valid.
    """

    def __init__(self, access: EtcdAccess, job: StoreJob, loss_timeout: float) -> None:
        self._beat = rules.beat(loss_timeout)
        self._keeper = StoreKeeper(access, job, loss_timeout)
        self._orders: queue.Queue[Callable[[], None]] = queue.Queue()
        self._sent = StoreView()  # what the newest order makes of the view
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()  # it inherits that: signals have to wake the member's loop
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    def turn(self) -> StoreView:
        """Return what is known now."""
        view = self._keeper.view
        return (
            view if view.order >= self._sent.order else self._sent._replace(content=view.content, problem=view.problem)
        )

    def follow(self, epoch: int) -> None:
        """Take part in this epoch, which another member coordinates."""
        order = self._next()
        self._orders.put(lambda: self._keeper.follow(epoch, order))

    def campaign(self, record: StoreRecord) -> None:
        """Become the coordinator of record.epoch, which is higher than any attempt that this member knows."""
        order = self._next(standing=Standing.WAIT)
        self._orders.put(lambda: self._keeper.campaign(record, order))

    def publish(self, record: StoreRecord) -> None:
        """Change the record of the epoch that this member coordinates; turn().content shows when that is done.

        The nodes have to be there before the first order to start, and a new attempt before its ranks.
        """
        self._orders.put(lambda: self._keeper.publish(record))

    def resign(self) -> None:
        """Give up the epoch or the campaign: another member may take over at once. This one has no ranks any more."""
        order = self._next()
        self._orders.put(lambda: self._keeper.resign(order))

    def finish(self, code: int) -> None:
        """Record that the job has ended with this exit code. Only its coordinator calls it."""
        self._orders.put(lambda: self._keeper.finish(code))

    def close(self, seconds: float) -> None:
        """Return when all orders are done, or after these seconds. Nothing is renewed after that."""
        end = time.monotonic() + seconds
        self._orders.put(self._stop)
        self._thread.join(max(0.0, end - time.monotonic()))
        self._closed = True

    def _next(self, standing: Optional[Standing] = None) -> int:
        self._sent = StoreView(self._sent.order + 1, standing)
        return self._sent.order

    def _stop(self) -> None:
        self._closed = True

    def _run(self) -> None:
        due = 0.0
        orders: Deque[Callable[[], None]] = deque()
        while not self._closed:
            try:
                orders.append(self._orders.get(timeout=max(0.0, due - time.monotonic())))
            except queue.Empty:
                pass
            due = time.monotonic() + self._beat
            self._turn(orders)
        self._keeper.close()

    def _turn(self, orders: Deque[Callable[[], None]]) -> None:
        """Obey orders, and renew what is to be renewed. An order for which the store could not be reached is done again.

        Errors are noted.
        """
        try:
            while orders and not self._closed:
                self._obey(orders)
            if not self._closed:
                self._keeper.beat()
        except EtcdError as error:
            self._note(str(error))
        except Exception as error:  # noqa: BLE001 - the boundary of a thread: what is not renewed ends by itself
            self._note(repr(error))

    def _obey(self, orders: Deque[Callable[[], None]]) -> None:
        order = orders.popleft()
        try:
            order()
        except EtcdError as error:
            if not error.final:
                orders.appendleft(order)
            raise

    def _note(self, problem: str) -> None:
        self._keeper.view = self._keeper.view._replace(problem=problem)
