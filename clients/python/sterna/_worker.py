"""The worker process: its pipes, its threads and its end."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from ._protocol import MAX_LINE, QUIT
from .errors import EngineError, EngineTimeout, ProtocolError

_STDERR_TAIL = 4096
"""So many bytes of the end of standard error are kept."""

_END_SECONDS = 5.0
"""How long a worker that was asked to end, or a thread whose pipe has closed, is waited for."""


class Worker:
    """A running ``sterna worker``.

    Reading is done by the caller, so a token is there as soon as its line is. Writing is done by a
    thread: a long prompt blocks nobody, whatever the worker does first. A second thread keeps
    standard error empty, and a third kills a worker that makes no progress, which ends the read
    that waits for it; that works alike on all systems.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None) -> None:
        # An interrupt from the keyboard is for this program to answer. A worker whose parent dies
        # ends by itself, as its input ends.
        new_group = getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
        no_window = getattr(subprocess, "CREATE_NO_WINDOW", 0)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                start_new_session=True,
                creationflags=new_group | no_window,
            )
        except OSError as error:
            raise EngineError(f"cannot start {command[0]!r}: {error}") from error
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None, "all three are pipes"
        self._stdout = stdout
        self._to_write: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._tail = _Tail()
        self._deadline = _Deadline(self._process.kill)
        self._killed = False
        self._reap_lock = threading.Lock()
        self._threads = [
            threading.Thread(target=_write_all, args=(stdin, self._to_write), daemon=True),
            threading.Thread(target=self._tail.fill_from, args=(stderr,), daemon=True),
            threading.Thread(target=self._deadline.watch, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def killed(self) -> bool:
        """Whether :meth:`kill` was called."""
        return self._killed

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def send(self, data: bytes) -> None:
        """Has ``data`` written, without waiting for it."""
        self._to_write.put(data)

    def read_line(self, what: str, seconds: float | None) -> bytes:
        """The next line of standard output, with its end.

        Raises :class:`EngineTimeout` if it does not come in time, :class:`EngineError` if the
        worker has ended, and :class:`ProtocolError` if the line is too long to be an integer's.
        """
        self._deadline.set(seconds)
        try:
            line = self._stdout.readline(MAX_LINE)
        except ValueError:
            # Another thread has closed the pipe meanwhile.
            line = b""
        in_time = self._deadline.clear()
        if line.endswith(b"\n"):
            return line
        if not in_time:
            raise EngineTimeout(f"{what} did not come within {seconds} s", stderr=self._said())
        if len(line) == MAX_LINE:
            raise ProtocolError(f"expected {what}, found {line!r}…", stderr=self._said())
        raise self.ended(f"the worker ended before {what}")

    def ended(self, message: str) -> EngineError:
        """The error that says how the process ended, which it has done or is about to do."""
        try:
            exit_code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return EngineError(f"{message}: it closed its output", stderr=self._said())
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        return EngineError(f"{message} ({how})", exit_code=exit_code, stderr=self._said())

    def _said(self) -> str:
        # If the process has ended, its last words are in the pipe: its thread ends after them.
        self._threads[1].join(0.0 if self.running else _END_SECONDS)
        return self._tail.text()

    def kill(self) -> None:
        """Ends the process at once, and with it a read that waits for it. Blocks nobody."""
        self._killed = True
        self._process.kill()

    def stop(self) -> None:
        """Asks the worker to end, and kills it if it does not."""
        self.send(QUIT)
        self._to_write.put(None)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self.reap()

    def reap(self) -> None:
        """Waits for the end of a process that was killed or asked to end, its threads and its pipes."""
        with self._reap_lock:
            self._process.wait()
            self._to_write.put(None)
            self._deadline.stop()
            for thread in self._threads:
                thread.join(_END_SECONDS)
            self._stdout.close()


def _write_all(stdin: IO[bytes], to_write: queue.SimpleQueue[bytes | None]) -> None:
    """Writes what comes until ``None``, then closes. After an error the rest is dropped.

    The error itself needs no report: a worker that doesn't read has ended, which the reading side
    sees too, with the reason.
    """
    broken = False
    while (data := to_write.get()) is not None:
        if broken:
            continue
        try:
            stdin.write(data)
            stdin.flush()
        except OSError:
            broken = True
    # What a broken pipe left in the buffer goes nowhere; the file is closed all the same.
    with contextlib.suppress(OSError):
        stdin.close()


class _Tail:
    """The end of a stream that a thread reads to its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = b""

    def fill_from(self, stream: IO[bytes]) -> None:
        with stream:
            # Lines, as a worker writes them; one without an end is taken in pieces.
            while data := stream.readline(_STDERR_TAIL):
                with self._lock:
                    self._bytes = (self._bytes + data)[-_STDERR_TAIL:]

    def text(self) -> str:
        with self._lock:
            return self._bytes.decode(errors="replace").strip()


class _Deadline:
    """Calls ``expire`` from its own thread if a time set is not cleared before it is over."""

    def __init__(self, expire: Callable[[], None]) -> None:
        self._expire = expire
        self._changed = threading.Condition()
        self._at: float | None = None
        self._wakes_at: float | None = None
        self._expired = False
        self._stopped = False

    def set(self, seconds: float | None) -> None:
        with self._changed:
            if seconds is None:
                return
            self._at = time.monotonic() + seconds
            # A thread that wakes before that by itself need not be woken: this runs for each token.
            if self._wakes_at is None or self._wakes_at > self._at:
                self._changed.notify()

    def clear(self) -> bool:
        """Whether the time was not over."""
        with self._changed:
            self._at = None
            return not self._expired

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def watch(self) -> None:
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                if self._at is not None and self._at <= now:
                    self._expired = True
                    self._expire()
                    return
                self._wakes_at = self._at
                self._changed.wait(None if self._at is None else self._at - now)
