"""What :func:`sterna.ray.deployment` is made of: gateways, replicas with a server each, and who answers what.

Needs Ray Serve when it is imported.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import quote

import aiohttp
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from yarl import URL

from ._prefixes import Beginnings, Holders, beginnings
from ._server import Server

_TRIES = 3
"""A request that so many replicas were lost with fails: it may be why."""

_ONGOING = 128
"""A request that a replica is answering counts as so many bytes of a prompt to compute."""

_HOME = 2 * _ONGOING
"""A prompt has a replica that it belongs to by its first bytes, which counts as so many that are held there."""

_OWN_HEADERS = {
    "connection",
    "content-length",
    "date",
    "expect",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    # Serve has it of the client or makes it, and adds it to the response.
    "x-request-id",
}
"""Headers of one connection, which aren't passed on."""

_KEY_HEADERS = {"authorization", "x-api-key"}

_CHANGES = {
    "/v1/load_lora_adapter",
    "/v1/models/load",
    "/v1/models/swap",
    "/v1/models/unload",
    "/v1/unload_lora_adapter",
}
"""What would change one replica and leave the others as they are."""

Headers: TypeAlias = list[tuple[str, str]]


@dataclass(frozen=True)
class Asked:
    """A request, as a gateway hands it to a replica."""

    method: str
    path: str
    """With the query."""
    headers: Headers
    body: bytes
    beginnings: Beginnings


@dataclass(frozen=True)
class Head:
    """The beginning of a response, and the first of its bytes."""

    status: int
    headers: Headers
    body: bytes
    """All of it, or the first events of a stream, whose others follow."""
    is_stream: bool


def application(
    model: str,
    *,
    least: int,
    most: int,
    cpus: float,
    gpus: float,
    at_once: int,
    queue: int,
    gateways: int,
    api_keys: str | None,
    drain: float,
    autoscaling: Mapping[str, Any],
    load: Mapping[str, Any],
) -> Any:
    """A Serve application of gateways before replicas."""
    arguments = ["--parallel", str(at_once), *load.get("arguments", ())]
    if api_keys is not None:
        arguments += ["--api-keys", api_keys]
    scale: dict[str, Any] = {"num_replicas": least}
    if least != most:
        limits = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": at_once}
        scale = {"autoscaling_config": {**limits, **autoscaling}}
    servers = serve.deployment(
        Replica,
        name="Server",
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        # As many as it answers, and as many that wait there, so that it has one when another ends.
        max_ongoing_requests=2 * at_once,
        max_queued_requests=queue,
        graceful_shutdown_timeout_s=drain,
        health_check_period_s=2,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter, max_backoff_s=0.1),
        **scale,
    )
    gateway = serve.deployment(
        Gateway,
        name="Gateway",
        num_replicas=gateways,
        ray_actor_options={"num_cpus": 0},
        # Who waits, waits for a replica, where `queue` is the limit.
        max_ongoing_requests=1 << 16,
        graceful_shutdown_timeout_s=drain,
    )
    return gateway.bind(servers.bind(model, {**load, "arguments": arguments}, api_keys is None))


class Replica:
    """A server, what passes requests on to it, and an end with it."""

    def __init__(self, model: str, load: Mapping[str, Any], is_open: bool) -> None:
        self._server = Server(model, **load)
        self._is_open = is_open
        self._name = serve.get_replica_context().replica_id.unique_id
        self._session: aiohttp.ClientSession | None = None
        self._is_ending = False
        threading.Thread(target=self._end_with_server, daemon=True).start()

    async def answer(self, asked: Asked) -> AsyncIterator[Head | bytes]:
        """The response: its head, then what follows of a stream, in whole events."""
        headers = [(name, value) for name, value in asked.headers if name not in _OWN_HEADERS]
        if self._is_open:
            headers = [(name, value) for name, value in headers if name not in _KEY_HEADERS]
            headers.append(("authorization", f"Bearer {self._server.key}"))
        try:
            async with self._http().request(
                asked.method,
                self._url(asked.path),
                headers=headers,
                data=asked.body or None,
                allow_redirects=False,
                skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            ) as response:
                sent = [
                    (name.lower(), value)
                    for name, value in response.headers.items()
                    if name.lower() not in _OWN_HEADERS
                ]
                sent.append(("x-replica", self._name))
                if response.content_type != "text/event-stream":
                    yield Head(response.status, sent, await response.read(), False)
                    return
                events = _whole_events(response.content.iter_any())
                yield Head(response.status, sent, await anext(events, b""), True)
                async for whole in events:
                    yield whole
        except aiohttp.ClientError:
            if not self._is_ending and await self._has_ended():
                self._end()
            raise

    async def check_health(self) -> None:
        """Serve asks, and puts another replica in the place of one that fails.

        A server whose device is being opened again is left alone: its answers go on then.
        """
        async with self._http().get(self._url("/health/live")) as response:
            if response.status != 200:
                raise RuntimeError(f"/health/live: expected status 200, found {response.status}")

    def __del__(self) -> None:
        # Serve calls it once all answers are over.
        self._is_ending = True
        if hasattr(self, "_server"):
            self._server.close()

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            # A connection for each request: one that was kept may be closed when it is used again.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
            )
        return self._session

    def _url(self, path: str) -> Any:
        host, port = self._server.address
        # As the client wrote it.
        return URL(f"http://{host}:{port}{path}", encoded=True)

    async def _has_ended(self) -> bool:
        """Whether the server has ended; where a connection broke it may be a moment until that is seen."""
        for _ in range(100):
            if self._server.process.poll() is not None:
                return True
            await asyncio.sleep(0.01)
        return False

    def _end_with_server(self) -> None:
        self._server.process.wait()
        if not self._is_ending:
            self._end()

    def _end(self) -> None:
        """Ends this process, so that Ray tells all gateways, and Serve begins another replica."""
        print(self._server.failure("the server ended"), file=sys.stderr, flush=True)
        os._exit(1)


class Gateway:
    """What Serve's proxies hand requests to: it knows prompts, and asks again where a replica is lost."""

    def __init__(self, servers: DeploymentHandle) -> None:
        self._answers = servers.options(method_name="answer", stream=True)

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        asked = Asked(request.method, _path(request), request.headers.items(), body, beginnings(body))
        if asked.path.partition("?")[0] in _CHANGES:
            return _refusal(asked, 403, "models and adapters of replicas are those that they begin with")
        for attempt in range(_TRIES):
            answer = self._answers.remote(asked)
            try:
                head = await anext(answer)
            except (ActorDiedError, ActorUnavailableError):
                continue
            except BackPressureError:
                return _refusal(asked, 429, "too many requests wait; ask again later")
            except asyncio.CancelledError:
                answer.cancel()
                raise
            if head.is_stream:
                response: Response = StreamingResponse(_stream(asked, head, answer), head.status)
            else:
                response = Response(head.body, head.status)
            for name, value in head.headers:
                response.headers.append(name, value)
            if attempt > 0:
                response.headers["x-replicas-lost"] = str(attempt)
            return response
        return _refusal(asked, 503, f"{_TRIES} replicas were lost while they answered this request")


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Chooses the replica with the fewest bytes of the prompt to compute, by what it has answered before."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._holders: Holders[ReplicaID] = Holders()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each, the best first. Those that are full are passed over."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        asked: Asked = pending_request.args[0]
        held = self._holders.held(asked.beginnings, {replica.replica_id for replica in candidate_replicas})
        # Gateways know nothing of each other, but have the same opinion of where a prompt that is new belongs.
        first = asked.beginnings[0][0] if asked.beginnings else os.urandom(8)
        home = max(candidate_replicas, key=lambda replica: _mix(first, replica), default=None)

        def cost(replica: RunningReplica) -> int:
            ongoing = self.replica_queue_len_cache.get(replica.replica_id) or 0
            there = held.get(replica.replica_id, 0) + (_HOME if replica is home else 0)
            return ongoing * _ONGOING - there

        return [[replica] for replica in sorted(candidate_replicas, key=cost)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remembers who has the prompt from now on."""
        asked: Asked = pending_request.args[0]
        self._holders.add(asked.beginnings, replica_id)


def _mix(first: bytes, replica: RunningReplica) -> bytes:
    return hashlib.blake2b(first + replica.replica_id.unique_id.encode(), digest_size=8).digest()


async def _whole_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A stream of events, cut only between them."""
    held = b""
    async for chunk in chunks:
        held += chunk
        end = held.rfind(b"\n\n") + 2
        if end >= 2:
            yield held[:end]
            held = held[end:]
    if held:
        yield held


async def _stream(asked: Asked, head: Head, answer: Any) -> AsyncIterator[bytes]:
    """The events of an answer; the last is an error where its replica is lost."""
    try:
        yield head.body
        async for events in answer:
            yield events
    except (ActorDiedError, ActorUnavailableError):
        error = json.dumps(_error(asked, 500, "the replica that wrote this answer was lost; ask again"))
        yield (
            f"event: error\ndata: {error}\n\n".encode()
            if _is_anthropic(asked)
            else f"data: {error}\n\n".encode()
        )
    finally:
        # Where the client has left.
        answer.cancel()


def _path(request: Request) -> str:
    path = quote(request.scope["path"].removeprefix(request.scope.get("root_path", "")), safe="/:@")
    query = request.scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _is_anthropic(asked: Asked) -> bool:
    return asked.path.startswith("/v1/messages")


def _error(asked: Asked, status: int, message: str) -> dict[str, Any]:
    """What the server would say."""
    if _is_anthropic(asked):
        kinds = {429: "rate_limit_error", 503: "overloaded_error"}
        return {"type": "error", "error": {"type": kinds.get(status, "api_error"), "message": message}}
    kind = {429: "rate_limit_error", 403: "invalid_request_error"}.get(status, "server_error")
    code = "queue_full" if status == 429 else None
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _refusal(asked: Asked, status: int, message: str) -> Response:
    again = None if status == 403 else {"retry-after": "1"}
    return JSONResponse(_error(asked, status, message), status, again)
