"""A model by its text: answers, chats, vectors and batches, from a server process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

from ._server import Server
from .errors import EngineTimeout, RequestError

Prompt: TypeAlias = str | Sequence[int]
"""Text, or ids of tokens."""

Message: TypeAlias = Mapping[str, Any]
"""``{"role": "user", "content": "…"}``, and what else a message of OpenAI's API has."""


@dataclass(frozen=True)
class Completion:
    """An answer."""

    text: str
    """What the model said."""
    finish_reason: str
    """``stop``, ``length``, or ``tool_calls``."""
    prompt_tokens: int
    """Tokens of the prompt."""
    cached_tokens: int
    """Those of them that had been computed before."""
    completion_tokens: int
    """Tokens of the answer."""
    raw: Mapping[str, Any]
    """The server's whole answer."""


def load(model: str | os.PathLike[str], **options: Any) -> Model:
    """A :class:`Model`, which is given the same arguments."""
    return Model(model, **options)


class Model:
    """A model that ``sterna serve`` runs, for this process alone.

    ``model`` is what ``sterna`` opens: a GGUF file, a folder, a package, its URL, or ``"builtin"``. The server listens
    on this machine with a key that only this object has, and ends with it: :meth:`close`, or a ``with`` statement.
    Methods may be called from several threads; their answers share steps.

    ``threads``, ``ctx``, ``backend`` and ``lora`` are the options of that name, ``arguments`` are others of
    ``sterna serve``. ``timeout`` is how many seconds loading, and a pause between parts of an answer, may take.

    Raises :class:`EngineError` where the server doesn't start.
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
        self._server = Server(
            model,
            program=program,
            threads=threads,
            ctx=ctx,
            backend=backend,
            lora=lora,
            arguments=arguments,
            timeout=timeout,
        )
        try:
            self.name = str(self._json("GET", "/v1/models")["data"][0]["id"])
        except BaseException:
            self.close()
            raise

    def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """What follows ``prompt``.

        ``options`` are fields of ``/v1/completions``: ``max_tokens``, ``temperature``, ``top_p``, ``seed``, ``stop``,
        ``response_format`` and the others. Raises :class:`RequestError` where the server refuses them.
        """
        return _completion(self._json("POST", "/v1/completions", self._asking(prompt=prompt, **options)))

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[str]:
        """The same, piece by piece. Leaving the loop ends the answer."""
        for choice in self._events("/v1/completions", self._asking(prompt=prompt, **options)):
            if choice["text"]:
                yield choice["text"]

    def chat(self, messages: str | Sequence[Message], **options: Any) -> Completion:
        """The answer to a conversation, or to one message of a user; ``options`` of ``/v1/chat/completions``."""
        asking = self._asking(messages=_messages(messages), **options)
        return _completion(self._json("POST", "/v1/chat/completions", asking))

    def stream_chat(self, messages: str | Sequence[Message], **options: Any) -> Iterator[str]:
        """The same, piece by piece."""
        asking = self._asking(messages=_messages(messages), **options)
        for choice in self._events("/v1/chat/completions", asking):
            if choice["delta"].get("content"):
                yield choice["delta"]["content"]

    def batch(self, prompts: Sequence[Prompt], *, at_once: int = 16, **options: Any) -> list[Completion]:
        """:meth:`generate` for each of ``prompts``, in their order, so many at once in shared steps.

        The answers are those that each prompt has alone. The first error is raised, once all have ended.
        """
        with ThreadPoolExecutor(max_workers=max(1, at_once)) as threads:
            answers = [threads.submit(self.generate, prompt, **options) for prompt in prompts]
        return [answer.result() for answer in answers]

    def embed(self, texts: str | Sequence[str], **options: Any) -> list[list[float]]:
        """A vector of length 1 for each text; ``pooling="last"`` or ``"mean"`` for a model that doesn't say how."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        answer = self._json("POST", "/v1/embeddings", self._asking(input=texts, **options))
        return [list(map(float, item["embedding"])) for item in answer["data"]]

    def encode(self, text: str) -> list[int]:
        """The ids of the tokens of ``text``."""
        return list(map(int, self._json("POST", "/tokenize", self._asking(prompt=text))["tokens"]))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
        return str(self._json("POST", "/detokenize", self._asking(tokens=list(ids)))["prompt"])

    def close(self) -> None:
        """Ends the server, after answers that are being computed."""
        self._server.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _asking(self, **fields: Any) -> dict[str, Any]:
        return {"model": getattr(self, "name", ""), **fields}

    @contextlib.contextmanager
    def _response(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        """The response to a request, which was not refused."""
        server = self._server
        connection = http.client.HTTPConnection(*server.address, timeout=server.timeout)
        headers = {"authorization": f"Bearer {server.key}", "content-type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RequestError.of(response.status, response.read().decode(errors="replace"))
            yield response
        except TimeoutError as error:
            raise EngineTimeout(f"the server said nothing for {server.timeout} seconds") from error
        except (OSError, http.client.HTTPException) as error:
            raise server.failure(f"the server did not answer: {error}") from error
        finally:
            connection.close()

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        with self._response(method, path, body) as response:
            return json.loads(response.read())

    def _events(self, path: str, asking: dict[str, Any]) -> Iterator[Any]:
        """The choices of a streamed answer."""
        with self._response("POST", path, {**asking, "stream": True}) as response:
            for line in response:
                data = line.removeprefix(b"data: ").strip()
                if not line.startswith(b"data: ") or data == b"[DONE]":
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise RequestError.of(response.status, json.dumps(event))
                yield from event["choices"]


def _messages(messages: str | Sequence[Message]) -> list[Message]:
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)


def _completion(answer: Mapping[str, Any]) -> Completion:
    choice, usage = answer["choices"][0], answer["usage"]
    text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
    return Completion(
        text=text,
        finish_reason=choice["finish_reason"],
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        completion_tokens=usage["completion_tokens"],
        raw=answer,
    )
