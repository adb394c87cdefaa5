"""kdecode: runs and decodes the Kimi K3 model family.

The public API is what is named here. Importing the package loads nothing else; a name is loaded
when it is first used, and torch and native code with `LLM`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from kdecode.config import ConfigError, EngineConfig
    from kdecode.engine.engine import LLM, ChatReply, Token
    from kdecode.engine.request import Output, RequestError, SamplingParams

__all__ = [
    "LLM",
    "ChatReply",
    "ConfigError",
    "EngineConfig",
    "Output",
    "RequestError",
    "SamplingParams",
    "Token",
]

_MODULES = {
    "ConfigError": "kdecode.config",
    "EngineConfig": "kdecode.config",
    "LLM": "kdecode.engine.engine",
    "ChatReply": "kdecode.engine.engine",
    "Token": "kdecode.engine.engine",
    "Output": "kdecode.engine.request",
    "RequestError": "kdecode.engine.request",
    "SamplingParams": "kdecode.engine.request",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"kdecode has no {name!r}; it has {', '.join(__all__)}.")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
