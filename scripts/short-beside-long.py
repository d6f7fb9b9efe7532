#!/usr/bin/env python3
"""Times the first token of short prompts that come while a server reads a long one.

    scripts/short-beside-long.py STERNA MODEL [--tokens 4000] [--turns 10] [--chunk 64] [-- FLAGS OF SERVE...]

Prints the median and the longest of `--turns`, beside three steps of decoding and the time of a chunk of the long prompt
(`--chunk` tokens: 64 on a CPU, 512 on a GPU), all in milliseconds as the client sees them. Fails if the median is longer. Where
the long prompt is read too soon, it takes more `--tokens`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

SHORT = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sterna")
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--port", type=int, default=8197)
    own, flags = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, flags = own[:at], own[at + 1 :]
    args = parser.parse_args(own)
    url = f"http://127.0.0.1:{args.port}"
    command = [args.sterna, "serve", args.model, "--no-files", "--quiet", "--port", str(args.port)]
    server = subprocess.Popen(command + ["--ctx", str(args.tokens + 512)] + flags)
    try:
        measure(args, url, server)
    finally:
        server.kill()
        server.wait()


def measure(args: argparse.Namespace, url: str, server: subprocess.Popen[bytes]) -> None:
    while True:
        try:
            models = json.load(urllib.request.urlopen(f"{url}/v1/models", timeout=5))
            break
        except OSError:
            if server.poll() is not None:
                sys.exit("the server ended")
            time.sleep(0.1)
    model = models["data"][0]["id"]
    rng = random.Random(7)

    def ask(n_prompt: int, n_tokens: int) -> float:
        """Milliseconds that an answer to a prompt of its own takes."""
        prompt = [rng.randrange(3, 400) for _ in range(n_prompt)]
        body = {"model": model, "prompt": prompt, "max_tokens": n_tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        start = time.monotonic()
        json.load(urllib.request.urlopen(request, timeout=600))
        return (time.monotonic() - start) * 1e3

    for _ in range(2):
        ask(args.tokens, 1)
        alone = ask(SHORT, 1)
    whole = statistics.median(ask(args.tokens, 1) for _ in range(3))
    step = (ask(SHORT, 65) - ask(SHORT, 1)) / 64
    chunk = whole * args.chunk / args.tokens
    beside = []
    for _ in range(args.turns):
        reading = threading.Thread(target=ask, args=(args.tokens, 1))
        reading.start()
        time.sleep(whole / 1e3 * rng.uniform(0.1, 0.7))
        beside.append(ask(SHORT, 1))
        if not reading.is_alive():
            sys.exit("the long prompt was read before the short one")
        reading.join()
    bound = 3 * step + chunk
    print(f"{args.tokens} tokens {whole:.1f} ms, a chunk {chunk:.1f}, a step {step:.2f}, {SHORT} tokens alone {alone:.1f}")
    print(f"beside: median {statistics.median(beside):.1f}, longest {max(beside):.1f}; three steps and a chunk {bound:.1f}")
    if statistics.median(beside) > bound:
        sys.exit("longer than that")


if __name__ == "__main__":
    main()
