"""A server process: how it is started, what says that it has ended, and how it is ended."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from .errors import EngineError

_STDERR_TAIL = 4096
"""So many bytes of the end of standard error are shown."""


def find_program() -> str:
    """The program: that of this package's wheel, else the one on the search path.

    Raises :class:`EngineError` where there is none.
    """
    name = "sterna.exe" if os.name == "nt" else "sterna"
    own = Path(sysconfig.get_path("scripts")) / name
    found = str(own) if own.is_file() else shutil.which("sterna")
    if found is None:
        raise EngineError(f"cannot find the program sterna: expected it at {own} or on the search path")
    return found


class Server:
    """``sterna serve`` on a free port of this machine, with a key that only this object has.

    It answers at ``address`` (host and port) who sends ``key``. It ends with this process, however that ends: with its
    standard input, which processes forked from this one without exec keep open. Raises :class:`EngineError` where it
    doesn't start.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        program: str | os.PathLike[str] | None = None,
        threads: int | None = None,
        ctx: int | None = None,
        backend: str | None = None,
        lora: Sequence[str | os.PathLike[str]] = (),
        arguments: Sequence[str] = (),
        timeout: float = 600.0,
    ) -> None:
        command = [os.fspath(program or find_program()), "serve", os.fspath(model)]
        command += ["--no-files", "--no-pages", "--quiet", "--port", "0", "--exit-on-stdin-close"]
        for name, value in (("threads", threads), ("ctx", ctx), ("backend", backend)):
            if value is not None:
                command += [f"--{name}", str(value)]
        for adapter in lora:
            command += ["--lora", os.fspath(adapter)]
        self.timeout = timeout
        self.key = secrets.token_urlsafe(32)
        # The end of standard error says why a server has ended; a file is never full.
        self._stderr = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env={**os.environ, "STERNA_API_KEY": self.key},
            )
        except OSError as error:
            self._stderr.close()
            raise EngineError(f"cannot start {command[0]!r}: {error}") from error
        assert self.process.stdout is not None, "it is a pipe"
        # Its first line is its address, which it prints once it can answer.
        address = urlsplit(self.process.stdout.readline().decode().strip())
        if address.hostname is None or address.port is None:
            failure = self.failure("the server did not start")
            self.close()
            raise failure
        self.address = (address.hostname, address.port)

    def failure(self, message: str) -> EngineError:
        """An error that says how the server ended, and what it said last."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_TAIL))
        said = self._stderr.read().decode(errors="replace").strip()
        return EngineError(message, exit_code=self.process.returncode, stderr=said)

    def close(self) -> None:
        """Ends the server, after answers that are being computed."""
        assert self.process.stdin is not None, "it is a pipe"
        if self.process.poll() is None:
            if os.name == "nt":
                # There a process can only be killed.
                self.process.stdin.close()
            else:
                # Others that were forked from this process may have the pipe, too.
                self.process.terminate()
            try:
                self.process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdin.close()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._stderr.close()
