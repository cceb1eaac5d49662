"""What a LiteLLM configuration names: `callbacks: ["litellm_hooks.prefix_affinity.instance"]`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import litellm

import litellm_hooks
from litellm_hooks.hook import PrefixAffinity
from litellm_hooks.settings import load_settings


def _say_if_shadowing() -> None:
    """LiteLLM runs a file of this path beside its configuration instead of the installed one, unregistered."""
    installed = Path(litellm_hooks.__file__).with_name("prefix_affinity.py")
    here = Path(__file__)
    if here.exists() and installed.exists() and not here.samefile(installed):
        logging.getLogger("litellm_hooks").warning(
            "prefix affinity: %s beside the configuration shadows the installed %s; remove the copy", here, installed
        )


_say_if_shadowing()
_registered = sys.modules.get("litellm_hooks.prefix_affinity")
if _registered is not None and vars(_registered) is not globals() and hasattr(_registered, "instance"):
    instance: PrefixAffinity = _registered.instance
else:
    instance = PrefixAffinity(load_settings(getattr(litellm, "callback_settings", None)))
