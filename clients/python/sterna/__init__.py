"""Runs language models with Sterna: text by a server process, tokens by a worker."""

from ._protocol import GREEDY, Form, Sampling
from ._server import find_program
from .engine import Answer, Engine, FinishReason
from .errors import EngineBusy, EngineError, EngineTimeout, ProtocolError, RequestError
from .model import Completion, Model, load

__all__ = [
    "GREEDY",
    "Answer",
    "Completion",
    "Engine",
    "EngineBusy",
    "EngineError",
    "EngineTimeout",
    "FinishReason",
    "Form",
    "Model",
    "ProtocolError",
    "RequestError",
    "Sampling",
    "find_program",
    "load",
]
