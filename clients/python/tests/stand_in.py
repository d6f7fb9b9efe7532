"""A stand-in for ``sterna worker`` that speaks both forms of the protocol, for the tests.

    stand_in.py worker --protocol-version MODEL
    stand_in.py worker --print-config MODEL
    stand_in.py worker MODEL [--lora] [--config ARGUMENTS…]
    stand_in.py tokenize MODEL --file FILE --json [--no-special]

Its "model" computes each token from all tokens before it, so that an answer from a wrong cache
differs. MODEL is a folder; a file ``behaviour`` in it holds words that make the stand-in misbehave.
What it reads is appended to the file ``read`` in that folder, and its arguments to ``arguments``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from typing import NoReturn

N_VOCAB = 100
N_CTX = 150_000
EOS = (7, 8)


def next_token(tokens: Iterable[int]) -> int:
    """The model: a hash of all tokens, and the end of the sequence now and then."""
    state = 0
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return EOS[0] if state % 16 == 0 else 10 + state % (N_VOCAB - 10)


def answer(tokens: Iterable[int], max_tokens: int = 0) -> list[int]:
    """What the model answers, by itself and without any cache; no end-of-sequence id."""
    tokens = list(tokens)
    given: list[int] = []
    while (token := next_token(tokens)) not in EOS:
        given.append(token)
        if len(given) == max_tokens or len(tokens) == N_CTX:
            break
        tokens.append(token)
    return given


def print_config(behaviour: list[str]) -> None:
    n_ctx = 40 if "small-context" in behaviour else N_CTX
    eos = () if "no-eos" in behaviour else EOS
    words = [2, 1, 128, 256, 2, 4, 2, N_VOCAB, 32, n_ctx, "1e-05", "10000.0", 1, 0, 0, 0, 0, len(eos), *eos]
    if "bad-config" in behaviour:
        words[7] = "many"
    if "short-config" in behaviour:
        words = words[:9]
    print(*words)


class Input:
    """Standard input by lines, with a record of what was read."""

    def __init__(self, record: str) -> None:
        self.record = record

    def line(self) -> str:
        line = sys.stdin.buffer.readline()
        with open(self.record, "ab") as file:
            file.write(line)
        if not line:
            sys.exit(0)
        return line.decode().rstrip("\n")

    def block(self) -> dict[str, str] | None:
        """The pairs of a block; ``None`` at the line that ends the worker."""
        n_pairs = int(self.line())
        if n_pairs == 0:
            return None
        pairs = (self.line().partition("=") for _ in range(n_pairs))
        return {key: value for key, _, value in pairs}

    def request(self, version_1: bool) -> tuple[int | None, list[int], int] | None:
        """Cached positions to keep (``None`` for all), new tokens, and the token limit."""
        if not version_1:
            pairs = self.block()
            if pairs is None:
                return None
            tokens = [int(word) for word in pairs["tokens"].split(",") if word]
            return int(pairs["kv_position"]), tokens, int(pairs["max_tokens"])
        n_tokens = int(self.line())
        if n_tokens == 0:
            return None
        reset, *_, max_tokens = [self.line() for _ in range(7)]
        tokens = [int(self.line()) for _ in range(n_tokens)]
        return 0 if reset == "1" else None, tokens, int(max_tokens)


def say(*values: object) -> None:
    print(*values, sep="\n", flush=True)


def fail(message: str) -> NoReturn:
    print(f"worker: {message}", file=sys.stderr, flush=True)
    sys.exit(3)


def work(model: str, behaviour: list[str], arguments: list[str]) -> None:
    version_1 = "--config" in arguments
    if "fails-to-load" in behaviour:
        fail("qmodel.tensors: expected 24 tensors, found 23")
    if "noisy" in behaviour:
        sys.stderr.write("x" * 300_000 + "\nlast words\n")
        sys.stderr.flush()
    if "deaf" in behaviour:
        time.sleep(600)
    if "talks-first" in behaviour:
        # More than a pipe holds, before anything is read.
        say(*[20] * 100_000)
    source = Input(os.path.join(model, "read"))
    n_ctx = 40 if "small-context" in behaviour else N_CTX
    eos = EOS if not version_1 else tuple(map(int, arguments[arguments.index("--config") + 19 :]))
    if not version_1:
        init = source.block()
        if init is None:
            return
        eos = tuple(int(word) for word in init["eos_tokens"].split(",") if word)
    cache: list[int] = []
    while (request := source.request(version_1)) is not None:
        keep, new, max_tokens = request
        keep = len(cache) if keep is None else keep
        if keep > len(cache):
            fail(f"kv_position: {keep} positions to keep, {len(cache)} in the cache")
        cache = cache[:keep] + new
        reply(cache, max_tokens, n_ctx, eos, version_1, behaviour, model)


def reply(
    cache: list[int],
    max_tokens: int,
    n_ctx: int,
    eos: tuple[int, ...],
    version_1: bool,
    behaviour: list[str],
    model: str,
) -> None:
    """Answers from ``cache``, and leaves in it what was computed."""
    n_prompt, n_given = len(cache), 0
    while True:
        token = 11 if "endless" in behaviour else next_token(cache)
        if "crash" in behaviour and n_given == 2:
            fail("out of memory")
        if "killed" in behaviour and n_given == 2:
            os.abort()
        if "quits" in behaviour and n_given == 2:
            sys.exit(0)
        if "hangs" in behaviour and n_given == 2:
            time.sleep(600)
        if "garbage" in behaviour and n_given == 2:
            say("\x00\x7fELF")
        if "long-line" in behaviour and n_given == 2:
            say("1" * 100_000)
        if "out-of-range" in behaviour and n_given == 2:
            say(N_VOCAB)
        if "cut" in behaviour and n_given == 2:
            sys.stdout.write("1")
            sys.stdout.flush()
            sys.exit(0)
        if token in eos:
            say(token)
            break
        say(token)
        n_given += 1
        if "step" in behaviour:
            go_on = os.path.join(model, f"go-{n_given}")
            while not os.path.exists(go_on):
                time.sleep(0.002)
        at_limit = n_given == max_tokens and "too-many" not in behaviour
        if at_limit or len(cache) == n_ctx:
            if not (at_limit and version_1):
                say(eos[0])
            break
        cache.append(token)
    if "bad-position" in behaviour:
        say(n_prompt + n_given + 2)
    elif "negative-position" in behaviour:
        say(-1)
    elif "forgetful" in behaviour:
        del cache[2:]
        say(2)
    else:
        say(len(cache))


def main() -> None:
    verb, *arguments = sys.argv[1:]
    model = next(word for word in arguments if not word.startswith("--"))
    if not os.path.isdir(model):
        fail(f"{model}: no such folder")
    with open(os.path.join(model, "arguments"), "a", encoding="utf-8") as file:
        print(json.dumps([verb, *arguments]), file=file)
    behaviour: list[str] = []
    if os.path.exists(os.path.join(model, "behaviour")):
        with open(os.path.join(model, "behaviour"), encoding="utf-8") as file:
            behaviour = file.read().split()
    if verb == "tokenize":
        with open(arguments[arguments.index("--file") + 1], "rb") as file:
            ids = [byte % N_VOCAB for byte in file.read()]
        special = [] if "--no-special" in arguments else [1]
        print("no ids" if "garbage" in behaviour else json.dumps({"ids": special + ids}))
    elif "--protocol-version" in arguments:
        print(2 if "other-version" in behaviour else 1)
    elif "--print-config" in arguments:
        print_config(behaviour)
    else:
        work(model, behaviour, arguments)


if __name__ == "__main__":
    main()
