"""Which distributed stores `kvtier render --behind` writes, as LMCache's own parsers read them."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from typing import Any

import pytest

pytest.importorskip("lmcache")

from lmcache.cli.commands.server import ServerCommand
from lmcache.v1.distributed.config import parse_args_to_config

from kvtier.render.lmcache_server import render
from lmcache_nvme_backend.doors.mp.params import parse_params
from lmcache_nvme_backend.doors.mp.remote import Remote, parse_remote
from tests.unit.kvtier import examples
from tests.unit.kvtier.boxes import UNIT

from .conftest import keys, wait_for

S3 = {"type": "s3", "s3_endpoint": "s3://kv.s3.eu-central-1.amazonaws.com", "s3_region": "eu-central-1"}
VALKEY = {"type": "valkey", "startup_nodes": "kv.example:6379", "tls_enable": True, "password": "secret"}
MOONCAKE = {
    "type": "mooncake_store", "local_hostname": "10.0.0.1", "metadata_server": "http://kv.example:8080/metadata",
    "master_server_addr": "kv.example:50051", "protocol": "tcp",
}  # fmt: skip


@pytest.mark.parametrize(
    ("behind", "parsed"),
    [
        ("redis://user:secret@kv.example", "RESPL2AdapterConfig"),
        ("valkey://kv.example:7000", "RESPL2AdapterConfig"),
        (json.dumps({"type": "resp", "host": "kv.example", "port": 6379}), "RESPL2AdapterConfig"),
        (json.dumps({"type": "fs", "base_path": "/mnt/shared"}), "FSL2AdapterConfig"),
        (json.dumps({"type": "fs_native", "base_path": "/mnt/shared"}), "FSNativeL2AdapterConfig"),
        (json.dumps(S3), "S3L2AdapterConfig"),
        (json.dumps(VALKEY), "ValkeyL2AdapterConfig"),
        (json.dumps(MOONCAKE), "MooncakeStoreL2AdapterConfig"),
    ],
)
def test_lmcaches_parser_takes_every_kind_that_is_written(behind: str, parsed: str) -> None:
    """The server's own parser takes the arguments, the door's the adapter's, and LMCache's the store's behind."""
    plan = examples.make(next(example for example in examples.EXAMPLES if example.name == "cpu-laptop"), UNIT)
    (line,) = [line for line in render(plan, behind).splitlines() if "lmcache server" in line]
    words = shlex.split(line)
    parser = argparse.ArgumentParser()
    ServerCommand().add_arguments(parser)
    (adapter,) = parse_args_to_config(parser.parse_args(words[words.index("server") + 1 :])).l2_adapter_config.adapters
    settings = parse_params(adapter.adapter_params)
    assert settings.behind is not None
    assert type(parse_remote(settings.behind)).__name__ == parsed


def test_a_client_that_was_closed_leaves_no_descriptor(tmp_path: Any) -> None:
    """A process that makes and closes many adapters does not run out of them; a late word of trouble opens none."""
    config = parse_remote({"type": "fs", "base_path": str(tmp_path)})

    def live() -> Remote:
        remote = Remote(config, "fs")
        assert remote.wait_up(30)
        asked = remote.lookup(keys(1))
        assert asked is not None and asked.result(10) == [False]
        remote.close()
        return remote

    live()
    before = _open_descriptors()
    remotes = [live() for _ in range(3)]
    wait_for(lambda: _open_descriptors() <= before)
    for remote in remotes:
        remote.close()
        remote.suspect("too late")
    assert _open_descriptors() <= before


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
