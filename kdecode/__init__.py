"""kdecode: runs and decodes the Kimi K3 model family.

The public API is what is named here. Importing the package loads neither torch nor native code;
`LLM` does when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kdecode.config import ConfigError, EngineConfig

if TYPE_CHECKING:
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
