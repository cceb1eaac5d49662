"""Replays a Mooncake-format trace through routing policies in simulated time and prints one table.

    python benchmarks/routing.py --trace FILE [--replicas 4] [--gpu-blocks N] [--nvme-blocks N] [--json FILE]

The policy `prefix_affinity` is the hook's own decision code (table, ledger, placement), driven by a simulated clock;
everything else here is the world it runs in:

* A replica is one server. A request waits its turn, its missing blocks are prefilled at PREFILL_RATE, blocks of the
  NVMe tier are restored at RESTORE_SPEEDUP times that rate, the first token is out, and its decoding costs the server
  DECODE_COST prefill tokens a token (so decoding delays what comes after it). Its answer ends ITL_S a token later.
* A replica's cache is a GPU pool that demotes to an NVMe tier: together one LRU in which, of one prompt, the tail goes
  before the head. Only an unbroken prefix counts as hit.
* Unless `--prefill-rate` says otherwise, the prefill rate is the one at which round robin keeps the replicas 70 %
  busy; one rate for all policies of a run.

Rows that are no policies: `oracle` sends every request to the replica with the least time to first token, knowing
every cache and queue; `shared_cache` gives all replicas one cache of the same total size, the bound of the hit ratio.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import sys
import time
from bisect import bisect_left
from collections import OrderedDict
from pathlib import Path
from typing import Any

import msgspec
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from litellm_hooks.ledger import Ledger
from litellm_hooks.placement import Candidate, Placement, Rules
from litellm_hooks.prefix import Prefix
from litellm_hooks.prefix_table import PrefixTable
from litellm_hooks.shared_state import Place

BLOCK_TOKENS = 512
GPU_BLOCKS = 1_000
NVME_BLOCKS = 9_000
RESTORE_SPEEDUP = 8.0
DECODE_COST = 6.0
ITL_S = 0.025
TARGET_BUSY = 0.70
SEED = 7


class Request(msgspec.Struct):
    """One line of the trace; `timestamp` in ms, `hash_ids` one a block of 512 tokens."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]

    @property
    def session(self) -> int:
        """What tells sessions apart in this trace: the block after the one that everybody shares."""
        return self.hash_ids[min(1, len(self.hash_ids) - 1)]


class Cache:
    """One LRU of blocks whose most recent `gpu` are in the pool, the others in the tier."""

    def __init__(self, gpu: int, nvme: int) -> None:
        self.gpu, self.total = gpu, gpu + nvme
        self.blocks: OrderedDict[int, None] = OrderedDict()
        self.pool: OrderedDict[int, None] = OrderedDict()

    def held(self, ids: list[int]) -> tuple[int, int]:
        """Leading blocks that are held, and how many of those lie in the tier."""
        count = tier = 0
        for block in ids:
            if block not in self.blocks:
                break
            count += 1
            tier += block not in self.pool
        return count, tier

    def use(self, ids: list[int]) -> None:
        for block in reversed(ids):
            for store in (self.blocks, self.pool):
                if block in store:
                    store.move_to_end(block)
                else:
                    store[block] = None
        while len(self.pool) > self.gpu:
            self.pool.popitem(last=False)
        while len(self.blocks) > self.total:
            gone, _ = self.blocks.popitem(last=False)
            self.pool.pop(gone, None)


class Server:
    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.free_at = 0.0
        self.busy = 0.0
        self.in_flight = 0


class World:
    """The replicas and the clock. `rate` is the prefill rate in tokens a second."""

    def __init__(self, replicas: int, gpu: int, nvme: int, rate: float, shared: bool) -> None:
        self.rate = rate
        one = Cache(gpu * replicas, nvme * replicas) if shared else None
        self.servers = [Server(one or Cache(gpu, nvme)) for _ in range(replicas)]

    def service(self, server: Server, request: Request) -> tuple[float, int]:
        """Seconds from start to first token, and hit tokens."""
        blocks, tier = server.cache.held(request.hash_ids)
        hit = min(blocks * BLOCK_TOKENS, request.input_length)
        missing = request.input_length - hit
        return max(missing, 1) / self.rate + tier * BLOCK_TOKENS / (self.rate * RESTORE_SPEEDUP), hit

    def time_to_first_token(self, server: Server, request: Request, now: float) -> float:
        return max(0.0, server.free_at - now) + self.service(server, request)[0]

    def serve(self, server: Server, request: Request, now: float) -> tuple[float, float, int]:
        """(time of the first token, time of the last, hit tokens)."""
        seconds, hit = self.service(server, request)
        first = max(now, server.free_at) + seconds
        decode = request.output_length * DECODE_COST / self.rate
        server.free_at = first + decode
        server.busy += seconds + decode
        server.cache.use(request.hash_ids)
        return first, max(first + request.output_length * ITL_S, server.free_at), hit


class Policy:
    """Picks a server's index; is told when an answer begins and ends."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = random.Random(SEED)

    def pick(self, number: int, request: Request, now: float) -> int:
        raise NotImplementedError

    def first_token(self, number: int, now: float) -> None:
        pass

    def done(self, number: int, now: float) -> None:
        pass


class RandomPick(Policy):
    def pick(self, number: int, request: Request, now: float) -> int:
        return self.random.randrange(len(self.world.servers))


class RoundRobin(Policy):
    def pick(self, number: int, request: Request, now: float) -> int:
        return number % len(self.world.servers)


class LeastBusy(Policy):
    """Fewest requests in flight, as LiteLLM's `least-busy`."""

    def pick(self, number: int, request: Request, now: float) -> int:
        flights = [server.in_flight for server in self.world.servers]
        low = min(flights)
        return self.random.choice([i for i, count in enumerate(flights) if count == low])


class SessionSticky(Policy):
    """LiteLLM's `session_affinity` with a perfect session id: the first pick by chance, then always there."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.pins: dict[int, int] = {}

    def pick(self, number: int, request: Request, now: float) -> int:
        return self.pins.setdefault(request.session, self.random.randrange(len(self.world.servers)))


class ConsistentHash(Policy):
    """A ring with 100 points a replica, on the session."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        points = [
            (xxhash.xxh3_64_intdigest(f"{index}/{point}".encode()), index)
            for index in range(len(world.servers))
            for point in range(100)
        ]
        self.ring = sorted(points)

    def pick(self, number: int, request: Request, now: float) -> int:
        key = xxhash.xxh3_64_intdigest(str(request.session).encode())
        return self.ring[bisect_left(self.ring, (key, 0)) % len(self.ring)][1]


class Oracle(Policy):
    def pick(self, number: int, request: Request, now: float) -> int:
        times = [self.world.time_to_first_token(server, request, now) for server in self.world.servers]
        return times.index(min(times))


class PrefixAffinity(Policy):
    """The hook's decision code under a simulated clock, in one proxy worker or several."""

    def __init__(
        self,
        world: World,
        rules: Rules | None = None,
        table_entries: int = 200_000,
        workers: int = 1,
        shared: bool = False,
    ) -> None:
        super().__init__(world)
        self.candidates = [Candidate(f"replica-{i}", f"server-{i}") for i in range(len(world.servers))]
        self.index = {candidate.name: i for i, candidate in enumerate(self.candidates)}
        self.workers = [
            Placement(PrefixTable(table_entries), Ledger(ttl_s=900.0, rate=world.rate), rules or Rules())
            for _ in range(workers)
        ]
        self.shared = shared
        for worker in self.workers:
            worker.blind = workers > 1 and not shared

    def pick(self, number: int, request: Request, now: float) -> int:
        ends = [min((i + 1) * BLOCK_TOKENS, request.input_length) for i in range(len(request.hash_ids))]
        root = min(1, len(ends) - 1)
        prefix = Prefix(request.hash_ids, ends, root, request.hash_ids[root])
        worker = self.workers[number % len(self.workers)]
        others = [other for other in self.workers if other is not worker] if self.shared else []
        for candidate in self.candidates if others else ():
            heard = [other.ledger.load(candidate.server) for other in others]
            load = worker.ledger.load(candidate.server)
            load.elsewhere_tokens = sum(other.prefill_tokens for other in heard)
            load.elsewhere_running = sum(other.running for other in heard)
        decision = worker.decide(prefix, self.candidates, 1.0, now)
        worker.table.record(prefix, decision.chosen)
        for other in others:
            held = decision.held if decision.chosen == decision.home else -1
            other.table.record(Place.of(prefix, held, decision.chosen).prefix, decision.chosen)
        uncached = decision.total_tokens - decision.predicted_tokens
        index = self.index[decision.chosen]
        worker.ledger.take(str(number), self.candidates[index].server, uncached, now)
        return index

    def first_token(self, number: int, now: float) -> None:
        self.workers[number % len(self.workers)].ledger.first_token(str(number), now)

    def done(self, number: int, now: float) -> None:
        self.workers[number % len(self.workers)].ledger.release(str(number))


POLICIES: dict[str, type[Policy]] = {
    "prefix_affinity": PrefixAffinity,
    "random": RandomPick,
    "round_robin": RoundRobin,
    "least_busy": LeastBusy,
    "session_sticky": SessionSticky,
    "consistent_hash": ConsistentHash,
    "oracle": Oracle,
    "shared_cache": Oracle,
}
BASELINES = ("random", "round_robin", "least_busy", "session_sticky", "consistent_hash")


class Row(msgspec.Struct):
    policy: str
    hit_ratio: float
    ttft_p50_s: float
    ttft_p99_s: float
    imbalance: float
    moved_sessions: int
    decision_us_p50: float
    busy: float


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def replay(name: str, requests: list[Request], replicas: int, gpu: int, nvme: int, rate: float, **options: Any) -> Row:
    """One policy over the whole trace."""
    world = World(replicas, gpu, nvme, rate, shared=name == "shared_cache")
    policy = POLICIES[name](world, **options)
    events: list[tuple[float, int, str, int, int]] = []
    ttft, decisions = [], []
    place: dict[int, int] = {}
    moved = hits = total = 0
    for number, request in enumerate(requests):
        now = request.timestamp / 1000.0
        while events and events[0][0] <= now:
            at, _, kind, which, index = heapq.heappop(events)
            if kind == "first":
                policy.first_token(which, at)
            else:
                world.servers[index].in_flight -= 1
                policy.done(which, at)
        before = time.perf_counter_ns()
        index = policy.pick(number, request, now)
        decisions.append((time.perf_counter_ns() - before) / 1000.0)
        moved += place.get(request.session, index) != index
        place[request.session] = index
        server = world.servers[index]
        server.in_flight += 1
        first, last, hit = world.serve(server, request, now)
        ttft.append(first - now)
        hits += hit
        total += request.input_length
        heapq.heappush(events, (first, 2 * number, "first", number, index))
        heapq.heappush(events, (last, 2 * number + 1, "done", number, index))
    busy = [server.busy for server in world.servers]
    span = max(requests[-1].timestamp / 1000.0, 1e-9)
    return Row(
        policy=name,
        hit_ratio=hits / total,
        ttft_p50_s=quantile(ttft, 0.50),
        ttft_p99_s=quantile(ttft, 0.99),
        imbalance=max(busy) / statistics.mean(busy),
        moved_sessions=moved,
        decision_us_p50=statistics.median(decisions),
        busy=statistics.mean(busy) / span,
    )


def calibrated_rate(requests: list[Request], replicas: int, gpu: int, nvme: int) -> float:
    """The prefill rate, in tokens a second, at which round robin keeps the replicas TARGET_BUSY busy.

    Round robin's placement does not depend on the rate and every cost is inversely proportional to it, so one replay
    at any rate gives it.
    """
    row = replay("round_robin", requests, replicas, gpu, nvme, rate=10_000.0)
    return 10_000.0 * row.busy / TARGET_BUSY


def load_trace(path: Path) -> list[Request]:
    decoder = msgspec.json.Decoder(Request)
    with path.open("rb") as lines:
        requests = [decoder.decode(line) for line in lines if line.strip()]
    return sorted((r for r in requests if r.hash_ids), key=lambda request: request.timestamp)


def table(rows: list[Row]) -> str:
    shared = next((row.hit_ratio for row in rows if row.policy == "shared_cache"), 0.0)
    head = (
        f"{'policy':<16} {'hit ratio':>9} {'of shared':>9} {'ttft p50':>9} {'ttft p99':>9} {'imbalance':>9} "
        f"{'moved':>6} {'busy':>6} {'decision µs':>11}"
    )
    lines = [head]
    for row in rows:
        share = f"{row.hit_ratio / shared:>9.1%}" if shared else " " * 9
        lines.append(
            f"{row.policy:<16} {row.hit_ratio:>9.2%} {share} {row.ttft_p50_s:>8.3f}s {row.ttft_p99_s:>8.2f}s "
            f"{row.imbalance:>9.3f} {row.moved_sessions:>6} {row.busy:>6.1%} {row.decision_us_p50:>11.1f}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--gpu-blocks", type=int, default=GPU_BLOCKS, help="blocks of 512 tokens in a replica's pool")
    parser.add_argument("--nvme-blocks", type=int, default=NVME_BLOCKS, help="blocks in a replica's tier")
    parser.add_argument("--prefill-rate", type=float, default=None, help="tokens a second; default: see above")
    parser.add_argument("--workers", type=int, default=1, help="proxy workers of the hook")
    parser.add_argument("--shared", action="store_true", help="the workers hear of each other, as by Redis, at once")
    parser.add_argument("--policy", action="append", choices=sorted(POLICIES), help="default: all of them")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    requests = load_trace(options.trace)
    shape = (options.replicas, options.gpu_blocks, options.nvme_blocks)
    rate = options.prefill_rate or calibrated_rate(requests, *shape)
    extra = {"prefix_affinity": {"workers": options.workers, "shared": options.shared}}
    rows = [replay(name, requests, *shape, rate=rate, **extra.get(name, {})) for name in options.policy or POLICIES]
    print(
        f"{len(requests)} requests over {requests[-1].timestamp / 1000:.0f} s, {options.replicas} replicas with "
        f"{options.gpu_blocks} + {options.nvme_blocks} blocks each, prefill {rate:.0f} tokens/s"
    )
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": msgspec.to_builtins(rows)}, indent=1))


if __name__ == "__main__":
    main()
