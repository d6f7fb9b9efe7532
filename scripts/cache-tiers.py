#!/usr/bin/env python3
"""Times prompts whose beginning a server has in each place: nowhere, in an engine's memory, in the machine's, in a folder.

    scripts/cache-tiers.py STERNA MODEL [--tokens 4000] [--prompts 6] [--memory 300MiB] [-- FLAGS OF SERVE...]

Each prompt is sent once, and again with 16 tokens more, when `--memory` has room for a few of them only; the server is
ended and started again before the folder is timed. Answers have to be those of a server that keeps nothing. Prints medians
in milliseconds, of one token each, and how many tokens weren't computed again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

MORE = 16


class Server:
    """A running server."""

    all: list[subprocess.Popen[bytes]] = []

    def __init__(self, args: argparse.Namespace, flags: list[str]) -> None:
        self.url = f"http://127.0.0.1:{args.port}"
        command = [args.sterna, "serve", args.model, "--no-files", "--quiet", "--port", str(args.port)]
        self.process = subprocess.Popen(command + ["--ctx", str(args.tokens + 512)] + flags + args.flags)
        self.all.append(self.process)
        for _ in range(600):
            try:
                models = json.load(urllib.request.urlopen(f"{self.url}/v1/models", timeout=5))
                self.model = models["data"][0]["id"]
                return
            except OSError:
                if self.process.poll() is not None:
                    sys.exit("the server ended")
                time.sleep(0.1)
        sys.exit("the server doesn't answer")

    def ask(self, ids: list[int]) -> tuple[float, int, str]:
        """Milliseconds until one token has come, tokens that were known, and the token."""
        body = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        start = time.monotonic()
        answer = json.load(urllib.request.urlopen(request, timeout=120))
        took = (time.monotonic() - start) * 1e3
        details = answer["usage"].get("prompt_tokens_details") or {}
        return took, details.get("cached_tokens", 0), answer["choices"][0]["text"]

    def end(self) -> None:
        """Lets it write what it keeps."""
        self.process.terminate()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sterna")
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--memory", default="300MiB")
    parser.add_argument("--port", type=int, default=8199)
    own, flags = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, flags = own[:at], own[at + 1 :]
    args = parser.parse_args(own)
    args.flags = flags
    prompts = [
        [1 + (i * 7919 + j * 104729 + j * j * 31) % 400 for j in range(args.tokens)] for i in range(args.prompts)
    ]
    longer = [ids + list(range(5, 5 + MORE)) for ids in prompts]

    def report(name: str, results: list[tuple[float, int, str]]) -> None:
        times, known = [r[0] for r in results], [r[1] for r in results]
        print(f"{name:<34}{statistics.median(times):>9.1f} ms   {statistics.median(known):>7.0f} tokens known")
        if [r[2] for r in results] != want:
            sys.exit(f"{name}: other answers than those of a server that keeps nothing")

    server = Server(args, ["--cache-memory", "1"])
    server.ask(longer[0][:300])
    computed = [server.ask(ids) for ids in longer]
    server.end()
    want = [r[2] for r in computed]
    report("computed", computed)
    server = Server(args, ["--cache-memory", "64GiB"])
    for ids in prompts:
        server.ask(ids)
    report("in the engine's memory", [server.ask(ids) for ids in longer])
    server.end()
    server = Server(args, ["--cache-memory", args.memory, "--cache-host-memory", "64GiB"])
    for ids in prompts:
        server.ask(ids)
    report("in the machine's memory", [server.ask(ids) for ids in longer])
    server.end()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--cache-memory", args.memory, "--cache-folder", folder, "--cache-folder-size", "64GiB"]
        server = Server(args, flags)
        for ids in prompts:
            server.ask(ids)
        report("in a folder", [server.ask(ids) for ids in longer])
        server.end()
        server = Server(args, flags)
        report("in a folder, after a restart", [server.ask(ids) for ids in longer])
        server.end()


if __name__ == "__main__":
    try:
        main()
    finally:
        for process in Server.all:
            process.kill()
