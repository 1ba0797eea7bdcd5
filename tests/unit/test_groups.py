"""How tests are given to workers of pytest-xdist."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, cast

from lab.groups import Groups


class Worker(SimpleNamespace):
    """One of pytest-xdist's."""

    __hash__ = object.__hash__


def test_a_worker_that_replaces_another_is_given_nothing_before_it_has_collected() -> None:
    sent: list[int] = []
    groups = cast("Any", object.__new__(Groups))
    groups.log = lambda *_: None
    groups.assigned_work, groups.registered_collections = {}, {}
    groups.workqueue = OrderedDict({"one": {"a::one": False}, "two": {"a::two": False}})
    worker = Worker(shutting_down=False, send_runtest_some=sent.extend)
    groups.add_node(worker)
    groups._reschedule(worker)
    assert sent == []
    groups.registered_collections[worker] = ["a::one", "a::two"]
    groups._reschedule(worker)
    assert sent == [0]
