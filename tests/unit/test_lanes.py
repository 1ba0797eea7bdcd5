"""How tests are given to workers."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, cast

from lab.lanes import Lanes


class Worker(SimpleNamespace):
    """One of pytest-xdist's."""

    __hash__ = object.__hash__


def test_a_worker_that_replaces_another_is_given_nothing_before_it_has_collected() -> None:
    sent: list[int] = []
    lanes = cast("Any", object.__new__(Lanes))
    lanes.log = lambda *_: None
    lanes.assigned_work, lanes.registered_collections = {}, {}
    lanes.workqueue = OrderedDict({"one": {"a::one": False}, "two": {"a::two": False}})
    worker = Worker(shutting_down=False, send_runtest_some=sent.extend)
    lanes.add_node(worker)
    lanes._reschedule(worker)
    assert sent == []
    lanes.registered_collections[worker] = ["a::one", "a::two"]
    lanes._reschedule(worker)
    assert sent == [0]
