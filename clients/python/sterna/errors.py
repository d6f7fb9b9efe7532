"""What can go wrong between a program and its worker."""

from __future__ import annotations

import json


class EngineError(Exception):
    """The worker could not be started, ended, or could not answer.

    ``exit_code`` is the worker's exit code: negative for the signal that ended it, ``None`` if it had
    not ended by itself. ``stderr`` is the end of what the worker wrote on its standard error.
    """

    def __init__(self, message: str, *, exit_code: int | None = None, stderr: str = "") -> None:
        super().__init__(f"{message}: {stderr}" if stderr else message)
        self.exit_code = exit_code
        self.stderr = stderr


class ProtocolError(EngineError):
    """The worker wrote something that the protocol does not allow. It was killed."""


class EngineTimeout(EngineError, TimeoutError):
    """The worker made no progress in the time it was given. It was killed."""


class RequestError(ValueError):
    """The server refused a request. ``status`` is HTTP's, ``param`` what the request has wrong, if one thing is."""

    def __init__(self, message: str, *, status: int, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param

    @classmethod
    def of(cls, status: int, body: str) -> RequestError:
        """What a response of that status says."""
        try:
            error = json.loads(body)["error"]
            return cls(str(error["message"]), status=status, param=error.get("param"))
        except (ValueError, KeyError, TypeError):
            return cls(f"status {status}: {body[:500]}", status=status)


class EngineBusy(RuntimeError):
    """An answer is still being read: an engine gives one at a time."""
