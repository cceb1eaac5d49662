"""For every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

# Other tests run at the same time: how long an example takes says nothing.
hypothesis.settings.register_profile("beside", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("beside")

# LiteLLM would ask the network for its list of prices, and wait, whenever it is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


@pytest.fixture(autouse=True)
def environment_of_one_test() -> Iterator[None]:
    """LMCache in this process sets variables (PROMETHEUS_MULTIPROC_DIR) that an engine started later would inherit."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
