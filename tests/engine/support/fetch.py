"""`python -m tests.engine.support.fetch METHOD URL [JSON]`: a request from inside a namespace; prints its body."""

from __future__ import annotations

import sys

import httpx

if __name__ == "__main__":
    method, url, *body = sys.argv[1:]
    answer = httpx.request(
        method, url, content=body[0] if body else None, headers={"content-type": "application/json"}, timeout=120.0
    )
    sys.stdout.write(answer.text)
    sys.exit(0 if answer.is_success else 1)
