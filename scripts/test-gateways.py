#!/usr/bin/env python3
"""Two servers of the built-in model behind gateways of others.

    scripts/test-gateways.py STERNA GATEWAY…

GATEWAY is a program of the PyPI packages `smg` (Shepherd Model Gateway) or `vllm-router`. Through each of them: what is
asked again goes to the server that has its beginning (`cached_tokens`); requests go on when a server is killed; SIGTERM
lets an answer that is being streamed end. Prints a line for each, and fails at the first that doesn't hold.
"""

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
from pathlib import Path

PATIENCE = 60.0
"""Seconds that anything may take."""


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body of a GET request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def wait_for(what: str, is_so, process: subprocess.Popen) -> None:
    """Waits until `is_so()`, while `process` runs."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"{what}: the process has ended with status {process.returncode}")
        try:
            if is_so():
                return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.1)
    raise SystemExit(f"{what}: not within {PATIENCE} seconds")


class Server:
    """`sterna serve` with the built-in model."""

    def __init__(self, sterna: str) -> None:
        self.port = free_port()
        command = [sterna, "serve", "builtin", "--no-files", "--quiet", "--threads", "1"]
        command += ["--ctx", "8192", "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_for("a server", lambda: get(self.port, "/health")[0] == 200, self.process)

    def metric(self, name: str) -> int:
        """The sum of a metric."""
        lines = get(self.port, "/metrics")[1].splitlines()
        values = [line.split()[-1] for line in lines if line.partition("{")[0].partition(" ")[0] == name]
        return sum(round(float(value)) for value in values)

    def stop(self, how: signal.Signals) -> int:
        """Sends a signal, and waits for the end. The exit status."""
        self.process.send_signal(how)
        return self.process.wait(PATIENCE)


class Gateway:
    """A gateway before `servers`."""

    def __init__(self, program: str, servers: list[Server], scratch: Path) -> None:
        self.port = free_port()
        command = [program, *(["launch"] if Path(program).name == "smg" else [])]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--policy", "cache_aware"]
        command += ["--prometheus-port", str(free_port()), "--log-level", "warning" if "vllm" in program else "warn"]
        # A server that is gone is noticed at the first failure: by default these ask it five times, or for a minute.
        command += ["--cb-failure-threshold", "1", "--health-check-interval-secs", "1", "--health-failure-threshold", "1"]
        command += ["--worker-urls", *(f"http://127.0.0.1:{server.port}" for server in servers)]
        self.log = scratch / "gateway.log"
        with self.log.open("w") as log:
            # Programs of its own must not outlive it.
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def is_ready(self) -> bool:
        """Whether a request is answered."""
        status, _ = self.complete("Once", 1)
        return status == 200

    def open(self, prompt: str, max_tokens: int, **more: object) -> http.client.HTTPResponse:
        """The response to a request for a completion."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        body = {"model": "builtin", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse()

    def complete(self, prompt: str, max_tokens: int) -> tuple[int, dict]:
        """Status and answer."""
        response = self.open(prompt, max_tokens)
        text = response.read()
        return response.status, json.loads(text) if response.status == 200 else {"error": text.decode()}

    def stop(self) -> None:
        """Ends it."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE)


NAMES = ["Ruby", "Tom", "Lily", "Ben", "Mia", "Sam", "Anna", "Max"]


def story(name: str) -> str:
    """The beginning of a conversation, unlike that of the others."""
    return f"{name} had a red ball. " + f"{name} liked to play with {name}'s friend in the big park. " * 8


def prefixes(gateway: Gateway, servers: list[Server]) -> str:
    """What is asked again finds what was computed of it, at the server that did."""
    # All at once, so that both servers have some.
    first = [threading.Thread(target=gateway.complete, args=(story(name), 64)) for name in NAMES]
    for thread in first:
        thread.start()
    for thread in first:
        thread.join()
    texts = {name: story(name) for name in NAMES}
    shares = []
    for _ in range(3):
        for name in NAMES:
            status, answer = gateway.complete(texts[name], 8)
            assert status == 200, answer
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert cached > usage["prompt_tokens"] // 2, (name, usage)
            shares.append(cached / usage["prompt_tokens"])
            texts[name] += answer["choices"][0]["text"] + " One day they met again."
    counts = [server.metric("sterna_requests_total") for server in servers]
    assert min(counts) > len(NAMES) // 4, counts
    return f"{len(shares)} of {len(shares)} found their beginning, {min(shares):.0%} of the prompt at least; requests by server {counts}"


def killed(gateway: Gateway, servers: list[Server]) -> str:
    """Requests are answered though the server that has their beginnings is killed."""
    def ask(name: str) -> None:
        status, answer = gateway.complete(story(name), 8)
        assert status == 200, answer

    for name in NAMES:
        ask(name)
    # The one that most beginnings would be sent to.
    held = max(servers, key=lambda server: server.metric("sterna_prompt_tokens_total"))
    held.stop(signal.SIGKILL)
    for name in NAMES:
        ask(name)
    return f"{len(NAMES)} requests answered again after the server that had most of them was killed"


def drained(gateway: Gateway, servers: list[Server]) -> str:
    """An answer that is streamed ends, though its server is told to."""
    chunks: list[str] = []
    ended = threading.Event()

    def read() -> None:
        response = gateway.open(story("Zoe"), 6000, stream=True, ignore_eos=True)
        for line in response:
            if line.startswith(b"data: "):
                chunks.append(line[6:].decode().strip())
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    busy: list[Server] = []

    def is_streaming() -> bool:
        busy[:] = [server for server in servers if server.process.poll() is None and server.metric("sterna_requests_running") > 0]
        return bool(busy) and len(chunks) > 2

    wait_for("an answer that is streamed", lambda: ended.is_set() or is_streaming(), gateway.process)
    assert busy and not ended.is_set(), "the answer ended before its server could be told to"
    before = len(chunks)
    status = busy[0].stop(signal.SIGTERM)
    reader.join(PATIENCE)
    assert ended.is_set() and chunks[-1] == "[DONE]", chunks[-1:]
    reasons = [json.loads(chunk)["choices"][0]["finish_reason"] for chunk in chunks[:-1] if '"choices":[{' in chunk]
    assert reasons[-1] == "length" and status == 0, (reasons[-1], status)
    after = gateway.complete(story("Zoe"), 8)
    assert after[0] == 200, after
    return f"SIGTERM after {before} of {len(chunks)} pieces: all came, the server ended with 0, the other goes on"


def main() -> int:
    """Tries each gateway; returns the exit status."""
    sterna, *gateways = sys.argv[1:]
    for program in gateways:
        with tempfile.TemporaryDirectory() as scratch:
            for what in (prefixes, killed, drained):
                servers = [Server(sterna), Server(sterna)]
                gateway = Gateway(program, servers, Path(scratch))
                try:
                    wait_for(f"{program}: ready", gateway.is_ready, gateway.process)
                    outcome = what(gateway, servers)
                    print(f"{Path(program).name}: {what.__name__}: {outcome}", flush=True)
                except BaseException:
                    print(gateway.log.read_text()[-2000:], file=sys.stderr)
                    raise
                finally:
                    gateway.stop()
                    for server in servers:
                        server.process.kill()
                        server.process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
