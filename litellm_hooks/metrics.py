"""What the hook shows of itself through prometheus_client's default registry, which LiteLLM's /metrics serves."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_PREFIX = "litellm_prefix_affinity"

DECISIONS = Counter(f"{_PREFIX}_decisions", "Requests placed, by reason.", ["reason"])
PREDICTED = Counter(f"{_PREFIX}_predicted_hit_tokens", "Prompt tokens believed to lie at the replica chosen.")
MEASURED = Counter(f"{_PREFIX}_measured_hit_tokens", "Prompt tokens that replicas reported as cached.")
PROMPTED = Counter(f"{_PREFIX}_prompt_tokens", "Prompt tokens that replicas reported.")
SPILLS = Counter(f"{_PREFIX}_spills", "Requests sent past the replica they would have gone to, for its load.")
FAILOVERS = Counter(f"{_PREFIX}_failovers", "Attempts that failed at a replica.", ["replica"])
FORGOTTEN = Counter(f"{_PREFIX}_forgotten", "Claims of a replica that were dropped, by cause.", ["cause"])
ERRORS = Counter(f"{_PREFIX}_errors", "Failures inside the hook that cost a decision and no request.", ["where"])
EXPIRED = Gauge(f"{_PREFIX}_expired_leases", "Calls whose end nobody reported.", multiprocess_mode="livesum")
TABLE = Gauge(f"{_PREFIX}_table_entries", "Prefixes remembered.", multiprocess_mode="livesum")
IN_FLIGHT = Gauge(f"{_PREFIX}_in_flight", "Calls leased to a replica.", ["replica"], multiprocess_mode="livesum")
BACKLOG = Gauge(
    f"{_PREFIX}_backlog_tokens", "Leased tokens yet to be prefilled.", ["replica"], multiprocess_mode="livesum"
)
SECONDS = Histogram(
    f"{_PREFIX}_decision_seconds",
    "Time a decision took.",
    buckets=(0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05),
)
