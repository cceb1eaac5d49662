"""The breaker alone: when it opens, when it probes, when it closes."""

from __future__ import annotations

import errno
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from lmcache_nvme_backend.store.breaker import ERRORS_TO_OPEN, PROBE_AFTER_MOST_S, PROBE_AFTER_S, SETTLED_S, Breaker

EIO = OSError(errno.EIO, "Input/output error")


class Disk:
    """A clock, and a probe that works or not."""

    def __init__(self):
        self.now = 0.0
        self.works = False
        self.probes = 0
        self.breaker = Breaker("/cache", self.probe, lambda: self.now)

    def probe(self):
        self.probes += 1
        if not self.works:
            raise EIO

    def fail(self, times, operation="read", error=EIO):
        for _ in range(times):
            self.breaker.failed(operation, error)

    def probed_after(self, limit_s=1000):
        """Seconds until the next probe."""
        before, begin = self.probes, self.now
        while self.probes == before and self.now - begin < limit_s:
            self.now += 0.5
            self.breaker.try_again()
        return self.now - begin


@pytest.fixture
def disk():
    return Disk()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_it_opens_after_errors_in_a_row_and_a_success_of_the_same_kind_starts_the_count_again(disk, operation):
    """One bad sector among good ones never stops the tier."""
    for _ in range(3):
        disk.fail(ERRORS_TO_OPEN - 1, operation)
        assert not disk.breaker.open
        disk.breaker.worked(operation)
    disk.fail(ERRORS_TO_OPEN, operation)
    assert disk.breaker.open


def test_loads_that_work_do_not_hide_that_no_store_does(disk):
    """A disk that turned read-only."""
    for _ in range(ERRORS_TO_OPEN):
        assert not disk.breaker.open
        disk.fail(1, "write", OSError(errno.EROFS, "Read-only file system"))
        disk.breaker.worked("read")
    assert disk.breaker.open


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOENT, errno.EISDIR, errno.ENOTEMPTY, errno.ELOOP])
def test_what_is_no_failure_of_the_disk_does_not_count(disk, code):
    """A full disk, and odd things in a chunk's place."""
    disk.fail(10 * ERRORS_TO_OPEN, "write", OSError(code, "x"))
    assert not disk.breaker.open


def test_it_says_once_that_it_opens_and_once_that_it_closes(disk, caplog):
    """However many errors and probes there are in between, with the error and the place."""
    caplog.set_level(logging.INFO)
    disk.fail(5 * ERRORS_TO_OPEN)
    for _ in range(5):
        disk.probed_after()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "steps aside" in caplog.text and "/cache" in caplog.text and "Input/output error" in caplog.text
    disk.works = True
    disk.probed_after()
    disk.breaker.try_again()
    assert not disk.breaker.open
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "works again" in caplog.text


def test_probes_come_early_first_and_then_ever_more_rarely(disk):
    """Up to a bound, so that it comes back by itself however long the failure lasts."""
    disk.fail(ERRORS_TO_OPEN)
    waits = [disk.probed_after() for _ in range(10)]
    assert waits[0] == PROBE_AFTER_S and waits[1] == 2 * PROBE_AFTER_S
    assert waits == sorted(waits) and waits[-1] == waits[-2] == PROBE_AFTER_MOST_S
    assert disk.breaker.open
    disk.works = True
    assert disk.probed_after() == PROBE_AFTER_MOST_S
    assert not disk.breaker.open


def test_a_disk_that_works_for_probes_only_is_tried_more_and_more_rarely(disk):
    """And one that has worked for long is probed early again."""
    disk.works = True
    waits = []
    for _ in range(8):
        disk.fail(ERRORS_TO_OPEN)
        waits.append(disk.probed_after())
        assert not disk.breaker.open
    assert waits == sorted(waits) and waits[0] == PROBE_AFTER_S and waits[-1] == PROBE_AFTER_MOST_S
    disk.now += SETTLED_S + 1
    disk.fail(ERRORS_TO_OPEN)
    assert disk.probed_after() == PROBE_AFTER_S


def test_threads_that_fail_together_open_it_once(disk, caplog):
    """One message, whoever comes last."""
    with ThreadPoolExecutor(8) as threads:
        for each in [threads.submit(disk.fail, 50) for _ in range(8)]:
            each.result()
    assert disk.breaker.open and len(caplog.records) == 1
