"""An API server on four nodes of Ray on one machine, whose replicas come and go under load.

Not a unit test: needs ``ray[serve]`` and Linux.

STERNA_PROGRAM=… python -m tests.ray_serving [routing]

``routing`` only compares how much of prompts replicas find, chosen by gateways and by Serve's own router.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.exceptions import ActorDiedError
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from starlette.requests import Request

import sterna
from sterna import _ray_serve
from sterna import ray as deployments
from sterna._ray_serve import Asked, Gateway, Head

PROGRAM = os.environ["STERNA_PROGRAM"]
PATIENCE = 300.0
"""Seconds that anything may take."""
LOAD: dict[str, Any] = {"program": PROGRAM, "ctx": 8192, "threads": 1}
AT_ONCE = 4
NAMES = ["Tom", "Lily", "Ben", "Mia", "Sam", "Anna", "Max", "Ruby"]
TURNS = ["Tell me a story about {}.", "What did {} do on the next day?", "And how did it end for {}?"]
N_CONVERSATIONS = 24
N_LONG = 500
"""Tokens of a long answer."""


@dataclass
class Reply:
    """What a client got."""

    status: int
    text: str
    n_prompt: int = 0
    n_cached: int = 0
    replica: str = ""
    n_lost: int = 0
    error: str | None = None
    """Of a stream that has begun."""


@dataclass
class Client:
    """Who asks Serve's address, and counts."""

    port: int
    streams: dict[int, str] = field(default_factory=dict)
    """The replicas of streams that are being read."""

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def chat(self, messages: Sequence[Any], *, stream: bool, **options: Any) -> Reply:
        """An answer, whole or of the pieces of a stream."""
        body = {"model": "builtin", "messages": messages, "temperature": 0, "stream": stream, **options}
        if stream:
            body["stream_options"] = {"include_usage": True}
        connection = self.connect()
        try:
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
            )
            response = connection.getresponse()
            reply = Reply(response.status, "", replica=response.headers.get("x-replica", ""))
            reply.n_lost = int(response.headers.get("x-replicas-lost", "0"))
            if response.status != 200:
                reply.text = response.read().decode()
            elif stream:
                self.streams[id(reply)] = reply.replica
                self._read(response, reply)
                del self.streams[id(reply)]
            else:
                answer = json.loads(response.read())
                reply.text = answer["choices"][0]["message"]["content"]
                usage(reply, answer["usage"])
            return reply
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """A metric of one replica."""
        connection = self.connect()
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def _read(self, response: http.client.HTTPResponse, reply: Reply) -> None:
        is_whole = False
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                is_whole = True
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                reply.error = event["error"]["message"]
                return
            for choice in event["choices"]:
                reply.text += choice["delta"].get("content") or ""
            if event.get("usage"):
                usage(reply, event["usage"])
        assert is_whole, "a stream ended without a word"


def usage(reply: Reply, said: dict[str, Any]) -> None:
    reply.n_prompt, reply.n_cached = said["prompt_tokens"], said["prompt_tokens_details"]["cached_tokens"]


class Tellers:
    """Conversations, and what one server says in them."""

    def __init__(self) -> None:
        self.messages: list[list[dict[str, str]]] = []
        with sterna.load("builtin", **LOAD) as model:
            for i in range(N_CONVERSATIONS):
                name = f"{NAMES[i % len(NAMES)]} number {i}"
                messages: list[dict[str, str]] = []
                for turn in TURNS:
                    messages.append({"role": "user", "content": turn.format(name)})
                    said = model.chat(messages, max_tokens=48, temperature=0).text
                    messages.append({"role": "assistant", "content": said})
                self.messages.append(messages)
            self.long = [{"role": "user", "content": "Tell me a long story."}]
            self.long_text = model.chat(self.long, max_tokens=N_LONG, temperature=0, ignore_eos=True).text

    def turn(self, i: int, n: int) -> tuple[list[dict[str, str]], str]:
        """What is asked in the turn of a conversation, and the answer."""
        return self.messages[i][: 2 * n + 1], self.messages[i][2 * n + 1]["content"]


class Load:
    """Clients that talk, turn after turn, until they are told to end."""

    def __init__(self, client: Client, tellers: Tellers, n_clients: int) -> None:
        self.replies: list[Reply] = []
        self.broken: list[Reply] = []
        self.failures: list[str] = []
        self._client, self._tellers = client, tellers
        self._ends = [threading.Event() for _ in range(n_clients)]
        self._threads = [threading.Thread(target=self._talk, args=(i,)) for i in range(n_clients)]
        for thread in self._threads:
            thread.start()

    def leave(self, n_clients: int) -> None:
        """So many go on."""
        for end in self._ends[n_clients:]:
            end.set()
        for thread in self._threads[n_clients:]:
            thread.join()

    def _talk(self, own: int) -> None:
        n_clients = len(self._ends)
        conversation = own
        while True:
            for n in range(len(TURNS)):
                if self._ends[own].is_set():
                    return
                messages, expected = self._tellers.turn(conversation, n)
                stream = (conversation + n) % 2 == 0
                try:
                    reply = self._client.chat(messages, stream=stream, max_tokens=48)
                except Exception as error:  # noqa: BLE001 - each is a failure that a client sees
                    self.failures.append(repr(error))
                    continue
                if reply.error is not None:
                    self.broken.append(reply)
                    if not expected.startswith(reply.text):
                        self.failures.append(f"another beginning: {reply}")
                elif reply.status != 200 or reply.text != expected:
                    self.failures.append(f"expected {expected!r}, found {reply}")
                self.replies.append(reply)
            conversation = (conversation + n_clients) % N_CONVERSATIONS


@contextlib.contextmanager
def talking(client: Client, tellers: Tellers, n_clients: int) -> Iterator[Load]:
    """Load, of which nothing may fail."""
    load = Load(client, tellers, n_clients)
    try:
        yield load
    finally:
        load.leave(0)
    assert not load.failures, f"{len(load.failures)} of {len(load.replies)}: {load.failures[:3]}"


@contextlib.contextmanager
def telling(client: Client, tellers: Tellers, n_clients: int) -> Iterator[list[Reply]]:
    """Clients that ask for long streams, one after another; each stream is whole."""
    told: list[Reply] = []
    failures: list[str] = []
    end = threading.Event()

    def tell() -> None:
        while not end.is_set():
            try:
                reply = client.chat(tellers.long, stream=True, max_tokens=N_LONG, ignore_eos=True)
            except Exception as error:  # noqa: BLE001 - each is a failure that a client sees
                failures.append(repr(error))
                continue
            if reply.text != tellers.long_text or reply.error is not None:
                failures.append(f"expected {tellers.long_text!r}, found {reply}")
            told.append(reply)

    threads = [threading.Thread(target=tell) for _ in range(n_clients)]
    for thread in threads:
        thread.start()
    try:
        yield told
    finally:
        end.set()
        for thread in threads:
            thread.join()
    assert told and not failures, failures[:1]


def wait_for(what: str, is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end, f"{what}: not within {PATIENCE} seconds"
        time.sleep(0.05)


def n_running() -> int:
    """Replicas that Serve routes to."""
    status = serve.status().applications["default"].deployments["Server"]
    return int(status.replica_states.get("RUNNING", 0))


def n_replicas() -> int:
    """All that there are, those that start and those that end too."""
    return sum(serve.status().applications["default"].deployments["Server"].replica_states.values())


def servers() -> dict[int, int]:
    """Processes of servers that replicas began, and the replicas' processes."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes().split(b"\0")
                if command[:3] == [PROGRAM.encode(), b"serve", b"builtin"] and b"--parallel" in command:
                    stat = (folder / "stat").read_text()
                    found[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
    return found


def end_orphans() -> None:
    """Ends servers whose replica is gone."""
    for server, parent in servers().items():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"ray::"):
                continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


def run(replicas: int | tuple[int, int], **options: Any) -> None:
    settings: dict[str, Any] = {"at_once": AT_ONCE, "load": LOAD, **options}
    serve.run(deployments.deployment("builtin", replicas=replicas, **settings))


def share(replies: Sequence[Reply]) -> float:
    """How much of prompts was held, of 100."""
    return 100 * sum(reply.n_cached for reply in replies) / sum(reply.n_prompt for reply in replies)


def main() -> None:
    tellers = Tellers()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(3):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(http_options={"port": port, "location": "HeadOnly"})
    client = Client(port)
    try:
        parts = (
            autoscaling,
            prefixes,
            replacing,
            partial(killing, cluster),
            losing,
            leaving,
            letting_in,
            waiting,
        )
        for part in (routing,) if sys.argv[1:] == ["routing"] else parts:
            begun = time.monotonic()
            part(client, tellers)
            print(f"  ({time.monotonic() - begun:.0f} s)", flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
    wait_for("no server is left", lambda: not servers())


def autoscaling(client: Client, tellers: Tellers) -> None:
    quick = {
        "upscale_delay_s": 1,
        "downscale_delay_s": 2,
        "look_back_period_s": 2,
        "metrics_interval_s": 0.5,
    }
    run((1, 4), autoscaling=quick)
    n_replies, n_retired = 0, 0
    for _ in range(2):
        with talking(client, tellers, 16) as load:
            wait_for("four replicas under load", lambda: n_running() == 4)
            load.leave(1)
            with telling(client, tellers, 2) as told:
                wait_for("replicas that end", lambda: n_running() < 4 and len(client.streams) > 0)
                begun = list(client.streams.values())
                wait_for("one replica without", lambda: n_replicas() == 1)
            left = told[-1].replica
            n_retired += sum(replica != left for replica in begun)
        assert not load.broken, load.broken[:3]
        n_replies += len(load.replies) + len(told)
    assert n_retired > 0, "nobody was told anything by a replica that was to end"
    print(
        f"from one replica to four and back, twice: {n_replies} answers, none failed, all equal; "
        f"{n_retired} streams of replicas that were to end, whole",
        flush=True,
    )


def prefixes(client: Client, tellers: Tellers) -> None:
    run(3)
    replies = []
    with talking(client, tellers, 8) as load:
        wait_for("each conversation twice", lambda: len(load.replies) > 2 * N_CONVERSATIONS * len(TURNS))
    # Those that were begun elsewhere, before there were three, have gone on.
    replies = load.replies[N_CONVERSATIONS * len(TURNS) :]
    by_replica = collections.Counter(reply.replica for reply in replies)
    assert len(by_replica) == 3 and min(by_replica.values()) > len(replies) / 10, by_replica
    assert share(replies) > 80, share(replies)
    print(
        f"three replicas: {share(replies):.0f} % of prompts held, {sorted(by_replica.values())} requests each",
        flush=True,
    )


def routing(client: Client, tellers: Tellers) -> None:
    """Conversations, each of which is had once by one of eight clients, with three replicas."""
    for n_words in (0, 150):
        for gateways in (1, 2):
            for router in (_ray_serve.PrefixRouter, PowerOfTwoChoicesRequestRouter):
                with mock.patch.object(_ray_serve, "PrefixRouter", router):
                    run(3, gateways=gateways)
                held = share(conversing(client, n_words))
                print(
                    f"{n_words} words more, {gateways} gateways, {router.__name__}: {held:.0f} %", flush=True
                )


def conversing(client: Client, n_words: int) -> list[Reply]:
    """The answers after the first of each of 96 conversations."""
    later: list[Reply] = []

    def talk(own: int) -> None:
        for i in range(own, 96, 8):
            name = f"{NAMES[i % len(NAMES)]} number {i}"
            messages: list[dict[str, str]] = []
            for n, turn in enumerate(TURNS):
                text = turn.format(name)
                if n == 0:
                    text += " ".join(f"{word} {NAMES[word % len(NAMES)]}" for word in range(i, i + n_words))
                messages.append({"role": "user", "content": text})
                reply = client.chat(messages, stream=n % 2 == 0, max_tokens=48)
                assert reply.status == 200 and reply.error is None, reply
                messages.append({"role": "assistant", "content": reply.text})
                if n > 0:
                    later.append(reply)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(talk, range(8)))
    return later


def replacing(client: Client, tellers: Tellers) -> None:
    """A new version takes the place of three replicas and of their gateway while each writes streams."""
    with talking(client, tellers, 4) as load, telling(client, tellers, 6) as told:
        wait_for("streams of three replicas", lambda: len(set(client.streams.values())) == 3)
        begun = set(client.streams.values())
        run(1)
        wait_for("one replica", lambda: n_replicas() == 1)
    assert told[-1].replica not in begun
    assert not load.broken, load.broken[:3]
    print(
        f"all of three replicas replaced by another: {len(told)} streams whole, {len(load.replies)} other answers",
        flush=True,
    )


def node_to_lose(cluster: Cluster) -> Any:
    """A node with replicas, and without what a client's requests go through."""
    actors = collections.defaultdict(set)
    for actor in ray._private.state.actors().values():
        if actor["State"] == "ALIVE":
            actors[actor["Address"]["NodeID"]].add(actor["ActorClassName"].rpartition(":")[2])
    return next(node for node in cluster.worker_nodes if actors[node.node_id] == {"Server"})


def killing(cluster: Cluster, client: Client, tellers: Tellers) -> None:
    """A server, then the process of a replica, then a node, while they answer."""
    for what in ("server", "replica", "node"):
        run(3)
        n_lost, n_broken, n_replies, n_kills = 0, 0, 0, 0
        with talking(client, tellers, 12) as load:
            while n_lost == 0 or n_broken == 0:
                assert n_kills < 10, "nothing was lost with ten of them"
                before = len(load.replies)
                wait_for("answers of three", lambda: n_running() == 3 and len(load.replies) > before + 24)  # noqa: B023
                if what == "node":
                    cluster.remove_node(node_to_lose(cluster), allow_graceful=False)
                    cluster.add_node(num_cpus=2)
                    wait_for("Serve has noticed", lambda: n_running() < 3)
                    # A machine that is lost takes them along; here they may outlive its other processes.
                    end_orphans()
                else:
                    server, replica = next(iter(servers().items()))
                    os.kill(server if what == "server" else replica, signal.SIGKILL)
                    wait_for("it is gone", lambda: server not in servers())  # noqa: B023
                n_kills += 1
                wait_for("another one", lambda: n_running() == 3)
                n_lost = sum(reply.n_lost > 0 for reply in load.replies)
                n_broken = len(load.broken)
        n_replies = len(load.replies)
        print(
            f"{n_kills} times a {what} killed under load: of {n_replies} answers {n_lost} asked again, none failed; "
            f"{n_broken} streams that it had begun ended with an error",
            flush=True,
        )


def leaving(client: Client, tellers: Tellers) -> None:
    """A client that goes away ends its answer, streamed or not."""
    run(1)
    wait_for("one replica", lambda: n_replicas() == 1)
    for stream in (True, False):
        before = client.metric("sterna_cancelled_answers_total")
        body = {"model": "builtin", "messages": tellers.long, "max_tokens": 7000, "ignore_eos": True}
        connection = client.connect()
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps({**body, "stream": stream}),
            {"content-type": "application/json"},
        )
        if stream:
            connection.getresponse().read(200)
        else:
            wait_for("it is asked", lambda: client.metric("sterna_requests_running") > 0)
        connection.close()
        wait_for(
            "its end",
            lambda: client.metric("sterna_cancelled_answers_total") == before + 1,  # noqa: B023
        )
    print("clients that leave: their answers end", flush=True)


class Losing:
    """Stands in for replicas, each of which is lost after so many parts of an answer."""

    def __init__(self, *parts: Head | bytes) -> None:
        self.parts = parts
        self.n_asked = 0

    def options(self, **_: Any) -> Losing:
        return self

    def remote(self, asked: Asked) -> Losing:
        self.n_asked += 1
        self._left = iter(self.parts)
        return self

    def cancel(self) -> None:
        pass

    def __aiter__(self) -> Losing:
        return self

    async def __anext__(self) -> Head | bytes:
        for part in self._left:
            return part
        raise ActorDiedError


async def asked_of(replicas: Losing, path: str) -> tuple[int, bytes]:
    """Status and body of a gateway's response."""
    body = {"type": "http.request", "body": b'{"messages": []}', "more_body": False}
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}

    async def receive() -> Any:
        return body

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    response = await Gateway(replicas)(Request(scope, receive))
    await response({**scope, "asgi": {"spec_version": "2.4"}}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def losing(client: Client, tellers: Tellers) -> None:
    """What a client is told: of replicas that are all lost, and in streams of each dialect."""
    head = Head(200, [("content-type", "text/event-stream")], b"data: 1\n\n", True)
    for path, kind, begin in (
        ("/v1/chat/completions", "server_error", b"data: "),
        ("/v1/messages", "api_error", b"event: error\ndata: "),
    ):
        all_lost = Losing()
        status, body = asyncio.run(asked_of(all_lost, path))
        assert (status, all_lost.n_asked) == (503, 3) and "error" in json.loads(body), (status, body)
        begun = Losing(head, b"data: 2\n\n")
        status, body = asyncio.run(asked_of(begun, path))
        rest = body.removeprefix(b"data: 1\n\ndata: 2\n\n" + begin)
        assert (status, begun.n_asked) == (200, 1) and rest != body and rest.endswith(b"\n\n"), body
        assert json.loads(rest)["error"]["type"] == kind, rest
    print(
        "replicas that are all lost: status 503 after three; streams end with their dialect's error",
        flush=True,
    )


def letting_in(client: Client, tellers: Tellers) -> None:
    """With a list of keys those that it names are answered; without one, everybody."""
    made = subprocess.run(
        [PROGRAM, "serve", "--new-api-key", "ann"], capture_output=True, text=True, check=True
    )
    key = next(word for word in (made.stdout + made.stderr).split() if word.startswith("sk-"))
    line = next(line for line in (made.stdout + made.stderr).splitlines() if line.startswith("ann "))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as keys:
        keys.write(f"{line}\n")
        keys.flush()
        for api_keys, expected in ((keys.name, [401, 401, 200]), (None, [200, 200, 200])):
            run(1, api_keys=api_keys)
            found = []
            for header in ({}, {"x-api-key": "sk-another"}, {"authorization": f"Bearer {key}"}):
                connection = client.connect()
                connection.request("GET", "/v1/models?x=1", headers=header)
                found.append(connection.getresponse().status)
                connection.close()
            assert found == expected, (api_keys, found)
            connection = client.connect()
            headers = {"authorization": f"Bearer {key}"}
            connection.request("POST", "/v1/models/swap?x=1", body="{}", headers=headers)
            assert connection.getresponse().status == 403, "a change of one replica"
            connection.close()
    print("a list of keys: those that it names are let in", flush=True)


def waiting(client: Client, tellers: Tellers) -> None:
    """More than may wait is refused."""
    run(1, at_once=1, queue=2)
    replies: list[Reply] = []

    def ask() -> None:
        replies.append(client.chat(tellers.long, stream=False, max_tokens=N_LONG, ignore_eos=True))

    asking = [threading.Thread(target=ask) for _ in range(12)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    by_status = collections.Counter(reply.status for reply in replies)
    assert set(by_status) == {200, 429}, by_status
    assert all(reply.text == tellers.long_text for reply in replies if reply.status == 200)
    refused = next(reply.text for reply in replies if reply.status == 429)
    assert json.loads(refused)["error"]["type"] == "rate_limit_error", refused
    print(f"a queue of two: {dict(by_status)}", flush=True)


if __name__ == "__main__":
    main()
