"""What is worth a write: second sight, the rule that knows when, the memory of what went, and the day's budget."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from store_helpers import CHUNK_FILE, NAMESPACE, aligned, open_store, payload_of, prefix, put, put_prefix

from lmcache_nvme_backend.store import ChunkStore, PutResult, StoreSettings, digest_fields, osio, snapshot, upkeep
from lmcache_nvme_backend.store.account import Ledger
from lmcache_nvme_backend.store.admission import Admission
from lmcache_nvme_backend.store.density import HitDensity
from lmcache_nvme_backend.store.format import BLOCK
from lmcache_nvme_backend.store.ghosts import FILE, FILE_BYTES, Ghosts
from lmcache_nvme_backend.store.index import Index
from lmcache_nvme_backend.store.write_budget import WriteBudget

DAY_S = 86_400
ROOMY = 5000  # chunks: a quota of which the ghosts' file is less than a 64th


@pytest.fixture
def clock(monkeypatch):
    """A clock of the policy's own."""

    class Clock:
        now = 1.7e9

        def __call__(self):
            return self.now

    return Clock()


def open_second_sight(root: Path, clock, **settings) -> ChunkStore:
    return ChunkStore.open(
        root,
        NAMESPACE,
        StoreSettings(quota_bytes=ROOMY * CHUNK_FILE, admission="second-sight", **settings),
        HitDensity(clock),
    )


def refusals(store, keys):
    return [store.refusal(key) for key in keys]


# --- second sight


def test_a_chunk_is_refused_until_another_request_asks_for_it(root, clock):
    """The lookup of the request that stores it is its first sight, however often that is repeated."""
    keys = prefix("new", 3)
    with open_second_sight(root, clock) as store:
        for _ in range(5):
            assert store.match(keys) == 0
            assert refusals(store, keys) == [PutResult.FIRST_SIGHT] * 3
            clock.now += 0.1
        clock.now += 30
        assert store.match(keys) == 0
        assert refusals(store, keys) == [None] * 3


def test_who_asks_for_a_chunk_has_asked_for_what_is_before_it(root, clock):
    """A head whose memory is lost does not refuse the prefix that was asked for twice."""
    keys = prefix("long", 4)
    with open_second_sight(root, clock) as store:
        store.match(keys)
        head = keys[0]
        slots = store._index.ghosts._slots
        at = int.from_bytes(head[8:10], "little") & -8
        for place in range(at, at + 8):
            slots[place] = 0
        clock.now += 30
        store.match(keys)
        assert refusals(store, keys) == [None] * 4


def test_a_rank_that_is_never_asked_goes_by_what_it_is_offered(root, clock):
    """Where only rank 0 answers lookups, the others still see a chunk for the second time."""
    keys = prefix("rank 1", 2)
    with open_second_sight(root, clock) as store:
        assert refusals(store, keys) == [PutResult.FIRST_SIGHT] * 2
        clock.now += 30
        assert refusals(store, keys) == [None] * 2


def test_second_sight_survives_a_restart(root, clock):
    """What was asked for before the engine ended is remembered after it."""
    keys = prefix("before", 3)
    with open_second_sight(root, clock) as store:
        store.match(keys)
    clock.now += 60
    with open_second_sight(root, clock) as store:
        store.match(keys)
        assert refusals(store, keys) == [None] * 3


@pytest.mark.parametrize("damage", ["missing", "empty", "flipped", "cut", "longer", "directory", "another namespace's"])
def test_a_damaged_memory_is_an_empty_one(root, clock, damage):
    """Never an error, and never a wrong answer but a forgotten one."""
    keys = prefix("before", 3)
    with open_second_sight(root, clock) as store:
        store.match(keys)
        path = Path(store.directory) / FILE
    data = path.read_bytes()
    assert len(data) == FILE_BYTES
    path.unlink()
    if damage == "directory":
        path.mkdir()
    elif damage != "missing":
        at = data.index(keys[0][10:14][::1]) if damage == "flipped" else 0
        path.write_bytes(
            {
                "empty": b"",
                "flipped": data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :],
                "cut": data[:-100],
                "longer": data + bytes(8),
                "another namespace's": data[:8] + bytes(16) + data[24:],
            }[damage]
        )
    clock.now += 60
    with open_second_sight(root, clock) as store:
        store.match(keys)
        assert refusals(store, keys) == [PutResult.FIRST_SIGHT] * 3
    assert path.is_dir() or path.stat().st_size == FILE_BYTES


def test_the_memory_of_what_went_is_bounded_and_forgets_the_oldest():
    """A table of fixed size: a hundred thousand chunks later, the last ten thousand are there."""
    ghosts = Ghosts()
    keys = [digest_fields("ghost", number) for number in range(100_000)]
    for number, key in enumerate(keys):
        ghosts.put(key, 1, 1000 + number // 100)
    assert sum(ghosts.find(key) is not None for key in keys[-10_000:]) > 9_990
    assert sum(ghosts.find(key) is not None for key in keys[:10_000]) < 2_000
    assert len(b"".join(ghosts.encode(bytes(16)))) == FILE_BYTES


# --- auto


class Root:
    """An account that says how full the root is."""

    def __init__(self):
        self.used = 0

    def peek(self):
        return Ledger(self.used, 0)


def learned(clock, returning: float):
    """An index that holds 100 chunks, whose first-seen chunks live for some 100 s and of which a share returned."""
    policy = HitDensity(clock)
    index = Index(policy, lambda: int(clock.now * 1e9))
    generator = random.Random(5)
    due: dict[int, list[bytes]] = {}
    for second in range(3000):
        clock.now += 1
        key = digest_fields("seen", second)
        if generator.random() < returning:
            due.setdefault(second + 40, []).append(key)
        for asked in (key, *due.pop(second, [])):
            index.use_prefix((asked,), pin=False)
            if asked not in index:
                if len(index) >= 100:
                    index.take_coldest(1, 0, 1, ())
                index.add(asked, 0, 1)
    return index


@pytest.mark.parametrize(
    ("returning", "full", "written"), [(0.5, True, True), (0.02, True, False), (0.02, False, True)]
)
def test_auto_writes_what_returns_in_time_and_all_while_there_is_room(root, clock, returning, full, written):
    """On first sight only where it is likely to be asked for before it has to go, or where nothing has to go."""
    index, account = learned(clock, returning), Root()
    settings = StoreSettings(quota_bytes=100 * BLOCK, admission="auto")
    admission = Admission(settings, account, index, WriteBudget(f"{root}/writes", 0))
    account.used = (100 if full else 50) * BLOCK
    key = digest_fields("fresh")
    index.use_prefix((key,), pin=False)
    assert (admission.refusal(key, BLOCK) is None) is written
    clock.now += 30
    index.use_prefix((key,), pin=False)
    assert admission.refusal(key, BLOCK) is None, "second sight is always good enough"


def test_auto_writes_everything_before_it_has_learned(root, clock):
    """A full disk alone refuses nothing."""
    index, account = Index(HitDensity(clock)), Root()
    account.used = 100 * BLOCK
    admission = Admission(
        StoreSettings(quota_bytes=100 * BLOCK, admission="auto"), account, index, WriteBudget(f"{root}/writes", 0)
    )
    assert admission.refusal(digest_fields("x"), BLOCK) is None


# --- the write budget


def budget_of(root: Path, clock, nbytes: int) -> WriteBudget:
    return WriteBudget(f"{root}/writes", nbytes, lambda: int(clock.now * 1e9))


def test_no_day_sees_more_than_its_budget(root, clock):
    """Whatever is asked when, and however often the engine restarts in between."""
    taken = []
    for _ in range(3 * 24 * 4):
        clock.now += 900
        budget = budget_of(root, clock, 1000)  # a restart
        while budget.take(7):
            taken.append((clock.now, 7))
    for start, _ in taken:
        assert sum(n for at, n in taken if start <= at < start + DAY_S) <= 1000
    assert sum(n for _, n in taken) > 2 * 1000


def test_an_idle_root_saves_up_a_quarter_of_a_day_and_no_more(root, clock):
    """The burst is bounded."""
    budget = budget_of(root, clock, 1000)
    assert budget.left() == 250 and budget.take(250) and not budget.take(1)
    clock.now += 10 * DAY_S
    assert budget.left() == 250


def test_a_clock_that_goes_back_gives_nothing(root, clock):
    """Time that did not pass fills no bucket."""
    budget = budget_of(root, clock, 1000)
    assert budget.take(250)
    clock.now -= 5 * DAY_S
    assert budget.left() == 0


@pytest.mark.parametrize("content", [b"", b"garbage", bytes(32)])
def test_a_damaged_budget_is_empty_and_fills_again(root, clock, content):
    """Damage must not be a way to write more."""
    path = root / "writes"
    path.write_bytes(content)
    budget = budget_of(root, clock, 1000)
    assert budget.left() == 0 and not budget.take(1)
    clock.now += DAY_S
    assert budget.left() == 250


def test_all_stores_of_a_root_share_one_budget(root):
    """Also one that is opened after the other has closed; what is refused is counted by its cause."""
    budget = {"write_budget_bytes_per_day": 4 * 3 * CHUNK_FILE}
    first, second = prefix("first", 2), prefix("second", 3)
    with open_store(root, **budget) as store:
        assert put_prefix(store, first) == [PutResult.STORED] * 2
    with open_store(root, **budget) as store:
        assert put_prefix(store, second)[:2] == [PutResult.STORED, PutResult.WRITE_BUDGET]
        assert store.refusal(second[1], CHUNK_FILE) is PutResult.WRITE_BUDGET
        assert store.stats.drops[PutResult.WRITE_BUDGET] == 2
        assert put(store, first[0]) is PutResult.EXISTS, "what is there costs nothing"
        assert (root / "v1" / "writes").stat().st_mode & 0o777 == 0o600


def test_a_chunk_that_the_budget_refuses_evicts_nothing(root):
    """Its room would be made for nobody."""
    old, new = prefix("old", 3), prefix("new", 1)
    with open_store(root, quota_chunks=3, write_budget_bytes_per_day=4 * 3 * CHUNK_FILE) as store:
        put_prefix(store, old)
        assert put(store, new[0]) is PutResult.WRITE_BUDGET
        assert store.match(old) == 3
        assert store.put(new[0], aligned(payload_of(new[0])), depth=0) is PutResult.WRITE_BUDGET


def test_a_scarce_budget_makes_auto_ask_for_second_sight(root, clock):
    """The bytes that are left go to what is worth most."""
    index, account = Index(HitDensity(clock)), Root()
    budget = budget_of(root, clock, 4 * 100 * BLOCK)
    admission = Admission(StoreSettings(quota_bytes=1000 * BLOCK, admission="auto"), account, index, budget)
    key = digest_fields("x")
    index.use_prefix((key,), pin=False)
    assert admission.refusal(key, BLOCK) is None
    budget.take(60 * BLOCK)
    admission._left_at = float("-inf")  # a second later
    assert admission.refusal(key, BLOCK) is PutResult.FIRST_SIGHT
    clock.now += 30
    index.use_prefix((key,), pin=False)
    assert admission.refusal(key, BLOCK) is None


def test_what_is_refused_at_first_sight_takes_nothing_of_the_budget(root, clock):
    """Many new chunks leave room for one that returns in the same second."""
    known, new = prefix("known", 1), prefix("new", 20)
    budget = 4 * 3 * CHUNK_FILE  # three chunks at once
    with open_second_sight(root, clock, write_budget_bytes_per_day=budget) as store:
        store.match(known)
        clock.now += 30
        assert [store.refusal(key, CHUNK_FILE) for key in new] == [PutResult.FIRST_SIGHT] * 20
        store.match(known)
        assert store.refusal(known[0], CHUNK_FILE) is None


def test_hints_are_part_of_the_budget(root, monkeypatch):
    """A snapshot is written to the same drive: it takes its bytes, and is not written where they are not left."""
    monkeypatch.setattr(upkeep, "SNAPSHOT_FROM", 1)
    budget = 4 * 3 * CHUNK_FILE
    with open_store(root, quota_chunks=ROOMY, write_budget_bytes_per_day=budget) as store:
        put_prefix(store, prefix("x", 2))
        left = WriteBudget(f"{root}/v1/writes", budget)
        before = left.left()
        store._upkeep._write_snapshot(closed=False)
        assert before - left.left() == pytest.approx(snapshot.size_of(2), abs=BLOCK // 64)
        path = Path(store.directory) / snapshot.FILE
        path.unlink()
        assert WriteBudget(f"{root}/v1/writes", budget).take(left.left())
        store._upkeep._write_snapshot(closed=False)
        assert not path.exists()
        monkeypatch.setattr(upkeep, "SNAPSHOT_FROM", 1000)


@pytest.mark.parametrize(
    "code, times, result",
    [
        (errno.ENOSPC, 1, PutResult.STORED),
        (errno.ENOSPC, 1000, PutResult.NO_SPACE),
        (errno.EIO, 1000, PutResult.IO_ERROR),
    ],
    ids=["full, then room", "full", "broken"],
)
def test_a_disk_that_cannot_note_what_is_spent_is_no_spent_budget(root, monkeypatch, code, times, result):
    """A full disk is helped by an eviction, as everywhere; a broken one is named, and counts for the breaker."""
    with open_store(root, write_budget_bytes_per_day=400 * CHUNK_FILE) as store:
        put_prefix(store, prefix("old", 3))
        failures = iter(range(times))
        pwrite = osio.pwrite

        def failing(fd, data, offset):
            if data.startswith(b"KVWRTE") and next(failures, None) is not None:
                raise OSError(code, "no")
            return pwrite(fd, data, offset)

        monkeypatch.setattr(osio, "pwrite", failing)
        assert put(store, prefix("new", 1)[0]) is result
        assert store.usage().reserved_bytes == 0
