from kvtier.scrape import Metrics

EXPOSITION = """
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 12.0
vllm:prompt_tokens_by_source_total{engine="1",source="local_compute"} 5.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 256.0
# TYPE kvtier_used_bytes gauge
kvtier_used_bytes{rank="0"} 0.0
"""


def test_samples_with_matching_labels_are_summed():
    """Engines and ranks add up; a label picks among them."""
    metrics = Metrics(EXPOSITION)
    assert metrics.value("vllm:prompt_tokens_by_source_total", source="local_compute") == 17
    assert metrics.value("vllm:prompt_tokens_by_source_total", source="local_compute", engine="1") == 5


def test_a_missing_metric_is_not_a_zero():
    """`get` tells a gauge at 0 from one that is not exported."""
    metrics = Metrics(EXPOSITION)
    assert metrics.get("kvtier_used_bytes") == 0
    assert metrics.get("kvtier_degraded") is None
    assert metrics.get("kvtier_used_bytes", rank="1") is None
