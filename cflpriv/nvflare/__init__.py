"""Run on NVFlare: in its simulator, in POC mode, and in a provisioned deployment.

NVFlare starts server and client processes and moves `Shareable`s; `cflpriv.federation` has the operations over messages.

    exchange         one transport: a controller and an executor that carry our bytes, with deadlines
    privacy_filter   a filter that clips, noises and charges the updates of any job, and stops at the budget

What a site lets out is decided by its own settings file (`exchange.site_settings`), never by a job. A server can read what it relays,
except what clients seal for each other; a pinned roster (`secagg_mode = "active"`) protects against a server that lies.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .exchange import CflprivController, CflprivExecutor
    from .privacy_filter import PrivacyFilter

_HOME = {"CflprivController": "exchange", "CflprivExecutor": "exchange", "PrivacyFilter": "privacy_filter"}

__all__ = ["CflprivController", "CflprivExecutor", "PrivacyFilter"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        try:
            return getattr(import_module(f".{_HOME[name]}", __name__), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] == "nvflare":
                raise ModuleNotFoundError("cflpriv.nvflare needs NVFlare: pip install 'cflpriv[nvflare]'", name="nvflare") from None
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
