"""Who has the beginning of a prompt: what a gateway knows of the requests that it has passed on."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Generic, TypeAlias, TypeVar

Holder = TypeVar("Holder")

Beginnings: TypeAlias = list[tuple[bytes, int]]
"""Digests of what a prompt begins with, and of how many bytes: the shortest first."""

_BLOCK = 256
"""Bytes of a prompt between one beginning of it that is remembered and the next."""

_PROMPT_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt")
"""Fields of requests that prompts are made of, in the order of templates."""


def beginnings(body: bytes) -> Beginnings:
    """What the prompt of a request begins with: after each message, and each block of bytes.

    Requests in all dialects are read alike; what isn't a JSON object has none.
    """
    try:
        asked = json.loads(body)
        return _beginnings(asked) if isinstance(asked, dict) else []
    except (ValueError, RecursionError):
        return []


def _beginnings(asked: Mapping[str, Any]) -> Beginnings:
    # Another model, or adapter, shares nothing.
    digest = hashlib.blake2b(json.dumps(asked.get("model")).encode(), digest_size=16)
    made: Beginnings = []
    n_bytes = 0
    for part in _parts(asked):
        for start in range(0, len(part), _BLOCK):
            block = part[start : start + _BLOCK]
            digest.update(block)
            n_bytes += len(block)
            made.append((digest.digest(), n_bytes))
    return made


def _parts(asked: Mapping[str, Any]) -> Iterable[bytes]:
    for name in _PROMPT_FIELDS:
        value = asked.get(name)
        if isinstance(value, list) and all(isinstance(item, dict) for item in value):
            # Messages, tools.
            yield from (json.dumps(item, sort_keys=True).encode() for item in value)
        elif value is not None:
            # A text without its end, so that a longer one begins with it; or ids of tokens.
            yield json.dumps(value).encode()[:-1]


class Holders(Generic[Holder]):
    """Which of several have computed what prompts begin with, ``limit`` beginnings at most.

    Those that were used least recently are forgotten, and of one prompt the longest first.
    """

    def __init__(self, limit: int = 1 << 17) -> None:
        self._limit = limit
        self._holders: OrderedDict[bytes, set[Holder]] = OrderedDict()

    def add(self, prompt: Beginnings, holder: Holder) -> None:
        """From now on ``holder`` has the prompt."""
        for digest, _ in reversed(prompt):
            self._holders.setdefault(digest, set()).add(holder)
            self._holders.move_to_end(digest)
        while len(self._holders) > self._limit:
            self._holders.popitem(last=False)

    def held(self, prompt: Beginnings, among: AbstractSet[Holder]) -> dict[Holder, int]:
        """How many bytes of a prompt each has of those that are there; the others are forgotten."""
        held: dict[Holder, int] = {}
        for digest, n_bytes in prompt:
            holders = self._holders.get(digest)
            if holders is None:
                break
            holders &= among
            if not holders:
                break
            held.update(dict.fromkeys(holders, n_bytes))
        return held
