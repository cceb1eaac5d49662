"""The adapter behind LMCache's own storage manager: stores, lookups, loads, restarts, damage."""

from __future__ import annotations

from .conftest import keys


def test_objects_come_back_from_disk_after_a_restart(node):
    """What one server stored, the next one on the same root serves, every byte."""
    first = node()
    what = keys(6)
    first.store(what)
    first.close()
    assert node().fetch(what) == 6
