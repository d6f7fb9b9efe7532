"""Runs language models with Sterna: tokens in, tokens out, through a worker process."""

from ._protocol import GREEDY, Form, Sampling
from .engine import Answer, Engine, FinishReason
from .errors import EngineBusy, EngineError, EngineTimeout, ProtocolError

__all__ = [
    "GREEDY",
    "Answer",
    "Engine",
    "EngineBusy",
    "EngineError",
    "EngineTimeout",
    "FinishReason",
    "Form",
    "ProtocolError",
    "Sampling",
]
