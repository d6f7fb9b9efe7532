"""An engine that answers tokens with tokens, by way of a ``sterna worker``."""

from __future__ import annotations

import asyncio
import itertools
import json
import operator
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Literal, Union

from ._protocol import Config, Form, Sampling, check_version, reply_integer, request
from ._worker import Worker
from .errors import EngineBusy, EngineError, EngineTimeout, ProtocolError

StrPath = Union[str, "os.PathLike[str]"]

FinishReason = Literal["stop", "length", "cancelled"]
"""Why an answer ended: the model ended it, it or the context was full, or it was cancelled."""


class Engine:
    """A model that runs in a worker process.

    ``model`` is anything that the program opens: a GGUF file, a folder, a package, ``builtin``.
    ``program`` is the ``sterna`` program, or a command that its arguments are appended to.

    The worker starts at once and loads the model while the caller goes on; what is wrong with the
    model's weights shows with the first answer. It remembers the tokens of the last prompt and
    answer, so a prompt that begins with them costs only what is new.

    All methods may be called from any thread. One answer is given at a time.
    """

    _closed = True

    def __init__(
        self,
        model: StrPath,
        *,
        program: str | Sequence[str] = "sterna",
        threads: int = 0,
        lora: StrPath | None = None,
        lora_quant: str | None = None,
        unembed_quant: str | None = None,
        eos: Iterable[int] | None = None,
        seed: int | None = None,
        form: Form = Form.KEY_VALUE,
        first_token_timeout: float | None = 180.0,
        token_timeout: float | None = 30.0,
    ) -> None:
        """Starts a worker.

        ``threads`` 0 leaves the number to the worker. ``lora`` is the folder of an adapter; in
        version 1 it can only lie in the model's own folder, and ``lora_quant`` and
        ``unembed_quant``, the types that adapter and output head are kept in, are unknown.
        ``eos`` are the ids that end an answer, if not those of the model. With ``seed``, the same
        prompt has the same answer each time, whatever the temperature.

        ``first_token_timeout`` includes loading and reading the prompt; ``token_timeout`` is for
        each token after it. Both are in seconds, ``None`` for no limit.

        Raises :class:`EngineError` if the program cannot be started or does not know the model.
        """
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        # The answer that is being read, by a mark of its own: an answer drops out of use unasked,
        # so its engine may not hold it.
        self._turn: object | None = None
        if threads < 0:
            raise ValueError(f"threads: {threads} is negative")
        self._program = [program] if isinstance(program, str) else list(program)
        self._model = os.fspath(model)
        self._form = form
        self._first_token_timeout = first_token_timeout
        self._token_timeout = token_timeout
        self._env = None if seed is None else {**os.environ, "STERNA_SEED": str(seed)}

        check_version(self._output_of("worker", "--protocol-version", self._model))
        config = Config.parse(self._output_of("worker", "--print-config", self._model))
        self._config = config if eos is None else Config(config.values, _checked(eos, config.n_vocab))
        if not self._config.eos:
            raise ValueError(f"{self._model} names no id that ends an answer: give some as `eos`")

        self._cached: list[int] = []
        self._command, self._opening = self._beginning(threads, lora, lora_quant, unembed_quant)
        self._worker = self._start()
        self._closed = False

    def _beginning(
        self, threads: int, lora: StrPath | None, lora_quant: str | None, unembed_quant: str | None
    ) -> tuple[list[str], bytes]:
        """The command of the worker, and what it is sent before any request."""
        command = [*self._program, "worker", self._model]
        extra = [
            (key, value)
            for key, value in (
                ("lora_dir", None if lora is None else os.fspath(lora)),
                ("lora_quant", lora_quant),
                ("unembed_quant", unembed_quant),
            )
            if value is not None
        ]
        if self._form is Form.KEY_VALUE:
            return command, self._config.init_block(threads, extra)
        if lora is not None:
            if os.path.realpath(lora) != os.path.realpath(self._model):
                raise ValueError(f"version 1 takes an adapter from the model's folder only, not from {lora}")
            command.append("--lora")
        if lora_quant is not None or unembed_quant is not None:
            raise ValueError("version 1 knows neither lora_quant nor unembed_quant")
        return [*command, "--config", *self._config.arguments(threads)], b""

    def _start(self) -> Worker:
        worker = Worker(self._command, self._env)
        if self._opening:
            worker.send(self._opening)
        return worker

    @property
    def n_vocab(self) -> int:
        """Token ids are below this."""
        return self._config.n_vocab

    @property
    def n_ctx(self) -> int:
        """Prompt and answer together have at most so many tokens."""
        return self._config.n_ctx

    @property
    def eos(self) -> tuple[int, ...]:
        """The ids that end an answer."""
        return self._config.eos

    @property
    def n_cached(self) -> int:
        """How many tokens the worker remembers."""
        with self._lock:
            return len(self._cached)

    def generate(
        self, tokens: Iterable[int], *, sampling: Sampling = Sampling(), max_tokens: int = 0
    ) -> list[int]:
        """The whole answer to a prompt; see :meth:`stream`. If cancelled, what came until then."""
        with self.stream(tokens, sampling=sampling, max_tokens=max_tokens) as answer:
            return list(answer)

    def stream(
        self, tokens: Iterable[int], *, sampling: Sampling = Sampling(), max_tokens: int = 0
    ) -> Answer:
        """Asks for the tokens that follow ``tokens``; they come one by one as the worker makes them.

        ``tokens`` is the whole sequence, not only what is new in it. It ends after ``max_tokens``
        tokens (0: no limit), or when the context is full, or with an end-of-sequence id, which is
        not part of the answer.

        Raises :class:`ValueError` if the tokens are not ids of the model or leave no room in its
        context, :class:`EngineBusy` if an answer is still being read, and :class:`EngineError` if
        no worker can be started.
        """
        prompt = list(_checked(tokens, self.n_vocab))
        if not prompt:
            raise ValueError("tokens: at least one is needed")
        if len(prompt) >= self.n_ctx:
            raise ValueError(f"tokens: {len(prompt)} leave no room in a context of {self.n_ctx}")
        if max_tokens < 0:
            raise ValueError(f"max_tokens: {max_tokens} is negative")
        with self._lock:
            if self._closed:
                raise ValueError("the engine is closed")
            if self._turn is not None:
                raise EngineBusy("an answer is still being read: read it to its end or cancel it")
            if self._worker is not None and not self._worker.running:
                # It ended between answers. What ended it shows if it happens to the next one too.
                self._worker.reap()
                self._worker = None
                self._cached = []
            if self._worker is None:
                self._worker = self._start()
            keep = self._n_reusable(prompt)
            self._worker.send(request(self._form, keep, prompt[keep:], sampling, max_tokens))
            self._turn = object()
            return Answer(self, self._worker, self._turn, prompt, max_tokens)

    def _n_reusable(self, prompt: list[int]) -> int:
        """How many cached tokens the prompt begins with. The last token is always computed."""
        n_common = min(len(self._cached), len(prompt))
        if self._cached[:n_common] != prompt[:n_common]:
            same = map(operator.eq, self._cached, prompt)
            n_common = sum(1 for _ in itertools.takewhile(bool, same))
        n_common = min(n_common, len(prompt) - 1)
        if self._form is Form.V1 and n_common < len(self._cached):
            return 0
        return n_common

    def cancel(self) -> None:
        """Ends the answer that is being read, if there is one; whoever reads it sees it end.

        The worker is killed, for the protocol has no other way. The next answer starts another.
        """
        with self._lock:
            turn = self._turn
        if turn is not None:
            self._abandon(turn)

    def close(self) -> None:
        """Ends the worker. An answer that is being read is cancelled."""
        with self._lock:
            self._closed = True
        self.cancel()
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed and not sys.is_finalizing():
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            self.close()

    def __repr__(self) -> str:
        return f"<sterna.Engine {self._model!r}>"

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text, by the model's own tokenizer.

        Special tokens written out in the text are recognised and the model's own are added, unless
        ``special`` is false.
        """
        # By a file: an argument has a length limit and no zero bytes.
        with tempfile.TemporaryDirectory(prefix="sterna-") as folder:
            path = os.path.join(folder, "text")
            with open(path, "wb") as file:
                file.write(text.encode())
            options = [] if special else ["--no-special"]
            output = self._output_of("tokenize", self._model, "--file", path, "--json", *options)
        try:
            return list(_checked(json.loads(output)["ids"], self.n_vocab))
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"tokenize: expected ids as JSON, found {output[:80]!r}") from error

    def _output_of(self, *arguments: str) -> str:
        """What a run of the program writes on its standard output."""
        command = [*self._program, *arguments]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self._first_token_timeout,
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except OSError as error:
            raise EngineError(f"cannot start {command[0]!r}: {error}") from error
        except subprocess.TimeoutExpired as error:
            raise EngineTimeout(f"{arguments[0]}: no end within {error.timeout} s") from error
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()
            message = f"{' '.join(arguments[:2])} failed (exit code {done.returncode})"
            raise EngineError(message, exit_code=done.returncode, stderr=said)
        return done.stdout.decode(errors="replace")

    # What answers tell their engine.

    def _answered(self, turn: object, cached: list[int]) -> bool:
        """Takes note of a complete answer; false if it was cancelled meanwhile."""
        with self._lock:
            if self._turn is not turn or self._worker is None or self._worker.killed:
                return False
            self._cached = cached
            self._turn = None
            return True

    def _abandon(self, turn: object) -> None:
        """Ends an answer that is not read to its end, and its worker."""
        with self._lock:
            worker = self._worker
            if self._turn is not turn or worker is None:
                return
            worker.kill()
        worker.reap()
        with self._lock:
            if self._turn is turn:
                self._turn = None
                self._worker = None
                self._cached = []


class Answer(Iterator[int], AsyncIterator[int]):
    """The tokens of an answer, as they come.

    An iterator, an asynchronous one too (``async for``), and a context manager. An answer that is
    closed, or dropped, before its end is cancelled.
    """

    def __init__(
        self, engine: Engine, worker: Worker, turn: object, prompt: list[int], max_tokens: int
    ) -> None:
        self._engine = engine
        self._worker = worker
        self._turn = turn
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._tokens: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._open = True

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that have come."""
        return tuple(self._tokens)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the answer ended; ``None`` while it has not, or if an error ended it."""
        return self._finish_reason

    def __iter__(self) -> Answer:
        return self

    def __next__(self) -> int:
        """The next token. Raises :class:`EngineError` if the worker fails."""
        if not self._open:
            raise StopIteration
        try:
            token = self._read()
        except BaseException as error:
            cancelled = self._worker.killed and isinstance(error, EngineError)
            self._open = False
            self._engine._abandon(self._turn)
            if not cancelled:
                raise
            self._finish_reason = "cancelled"
            token = None
        if token is None:
            self._open = False
            raise StopIteration
        return token

    def _read(self) -> int | None:
        engine, n_tokens = self._engine, len(self._tokens)
        if engine._form is Form.V1 and n_tokens == self._max_tokens > 0:
            self._finish([])
            return None
        what, seconds = "a token", engine._token_timeout
        if not self._tokens:
            what, seconds = "the first token", engine._first_token_timeout
        token = reply_integer(self._worker.read_line(what, seconds), what, engine.n_vocab)
        if token in engine.eos:
            self._finish([token])
            return None
        # The last token of a context need not be computed, so there may be one more than fits.
        most = self._max_tokens or engine.n_ctx - len(self._prompt) + 1
        if n_tokens == most:
            raise ProtocolError(f"expected the end of an answer of {most} tokens, found token {token}")
        self._tokens.append(token)
        return token

    def _finish(self, eos: list[int]) -> None:
        """Reads what follows the tokens, of which ``eos`` was the last."""
        known = [*self._prompt, *self._tokens, *eos]
        what = "the KV position"
        line = self._worker.read_line(what, self._engine._token_timeout)
        position = reply_integer(line, what, len(known) + 1)
        if not self._engine._answered(self._turn, known[:position]):
            raise EngineError("cancelled")
        # Where a limit ends the tokens, the newer form adds an end-of-sequence id that means nothing.
        n_tokens = len(self._tokens)
        at_limit = n_tokens == self._max_tokens > 0 or len(self._prompt) + n_tokens >= self._engine.n_ctx
        self._finish_reason = "length" if at_limit or not eos else "stop"

    def cancel(self) -> None:
        """Ends the answer, if it has not ended; may be called while another thread reads it."""
        if self._open:
            self._open = False
            self._engine._abandon(self._turn)
            self._finish_reason = self._finish_reason or "cancelled"

    close = cancel

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.cancel()

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> int:
        """The next token; a task that is cancelled while it waits cancels the answer."""
        try:
            token = await asyncio.to_thread(next, self, None)
        except asyncio.CancelledError:
            self.cancel()
            raise
        if token is None:
            raise StopAsyncIteration
        return token


def _checked(tokens: Iterable[int], n_vocab: int) -> tuple[int, ...]:
    """The ids as plain integers. Raises :class:`ValueError` if the model has none such."""
    ids = tuple(map(operator.index, tokens))
    for place, token in enumerate(ids):
        if not 0 <= token < n_vocab:
            raise ValueError(f"tokens[{place}]: {token} is not from 0 to {n_vocab - 1}")
    return ids
