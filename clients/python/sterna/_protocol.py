"""The lines that go through the worker's pipes, in both forms of the protocol.

Version 1 passes the model's configuration as arguments and values by their order. The newer form,
``KEY_VALUE`` here, begins with a block of ``key=value`` lines and has such a block in every request.
No function here does any I/O.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ProtocolError

PROTOCOL_VERSION = 1
"""What ``sterna worker --protocol-version`` has to say."""

MAX_EOS_V1 = 8
"""Version 1 has room for so many end-of-sequence ids."""

MAX_LINE = 32
"""No line of a reply is longer, in bytes: each is one integer."""

_INTEGER = re.compile(rb"-?[0-9]{1,19}\r?\n")


class Form(enum.Enum):
    """How a worker is spoken to."""

    V1 = "v1"
    KEY_VALUE = "key-value"


@dataclass(frozen=True)
class Sampling:
    """How each token is chosen. The defaults are those of the protocol's existing users.

    ``temperature`` 0 takes the likeliest token; ``top_k`` 0 and ``top_p`` 1 leave all tokens in;
    ``repetition_penalty`` 1 penalises nothing, and others apply to the last
    ``rep_penalty_lookback`` tokens.
    """

    temperature: float = 0.6
    top_k: int = 50
    top_p: float = 0.9
    repetition_penalty: float = 1.1
    rep_penalty_lookback: int = 64

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature: {self.temperature} is not a number from 0 up")
        if self.top_k < 0:
            raise ValueError(f"top_k: {self.top_k} is negative")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} is not above 0 and at most 1")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(f"repetition_penalty: {self.repetition_penalty} is not above 0")
        if self.rep_penalty_lookback < 0:
            raise ValueError(f"rep_penalty_lookback: {self.rep_penalty_lookback} is negative")


GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0, rep_penalty_lookback=0)
"""Always the likeliest token."""

_CONFIG_FIELDS = (
    "arch_type",
    "activation",
    "hidden_dim",
    "intermediate_dim",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "vocab_size",
    "head_dim",
    "max_position_embeddings",
    "norm_eps",
    "rope_theta",
    "tie_word_embeddings",
    "has_qkv_bias",
    "has_attn_sub_norm",
    "has_ffn_sub_norm",
)
"""The arguments of version 1 before the thread count, in their order; keys of the newer form too."""


@dataclass(frozen=True)
class Config:
    """A model's configuration, as ``sterna worker --print-config`` prints it.

    ``values`` are the words of the first 16 arguments, passed on as they were printed, so that no
    number changes on the way.
    """

    values: tuple[str, ...]
    eos: tuple[int, ...]

    @classmethod
    def parse(cls, line: str) -> Config:
        """Reads the line of arguments. Raises :class:`ProtocolError` if it isn't one."""
        words = line.split()
        n_fixed = len(_CONFIG_FIELDS)
        if len(words) < n_fixed + 2:
            raise ProtocolError(
                f"configuration: expected at least {n_fixed + 2} words, found {len(words)}: {line[:200]!r}"
            )
        values = tuple(words[:n_fixed])
        # The thread count, next in order, is the caller's to choose.
        n_eos = _natural("num_eos_tokens", words[n_fixed + 1])
        eos = tuple(_natural("eos_token_id", word) for word in words[n_fixed + 2 :])
        if len(eos) != n_eos:
            raise ProtocolError(f"configuration: {n_eos} end-of-sequence ids announced, found {len(eos)}")
        config = cls(values, eos)
        for name, at_least in (("vocab_size", 1), ("max_position_embeddings", 1)):
            if _natural(name, config._value(name)) < at_least:
                raise ProtocolError(f"configuration: {name} is {config._value(name)}")
        return config

    def _value(self, name: str) -> str:
        return self.values[_CONFIG_FIELDS.index(name)]

    @property
    def n_vocab(self) -> int:
        """Ids are below this."""
        return int(self._value("vocab_size"))

    @property
    def n_ctx(self) -> int:
        """Prompt and answer together have at most so many tokens."""
        return int(self._value("max_position_embeddings"))

    def arguments(self, threads: int) -> list[str]:
        """What follows ``--config`` in version 1."""
        if len(self.eos) > MAX_EOS_V1:
            raise ValueError(f"version 1 has room for {MAX_EOS_V1} end-of-sequence ids, not {len(self.eos)}")
        return [*self.values, str(threads), str(len(self.eos)), *map(str, self.eos)]

    def init_block(self, threads: int, extra: Sequence[tuple[str, str]]) -> bytes:
        """The block that opens the newer form; ``extra`` are its optional keys."""
        pairs = [("protocol_version", str(PROTOCOL_VERSION))]
        pairs.extend(zip(_CONFIG_FIELDS, self.values, strict=True))
        pairs.append(("eos_tokens", ",".join(map(str, self.eos))))
        if threads:
            pairs.append(("num_threads", str(threads)))
        return _block([*pairs, *extra])


def check_version(line: str) -> None:
    """Raises :class:`ProtocolError` if a worker that printed ``line`` speaks another version."""
    if line.strip() != str(PROTOCOL_VERSION):
        raise ProtocolError(f"protocol version: expected {PROTOCOL_VERSION}, found {line.strip()[:40]!r}")


def _natural(name: str, word: str) -> int:
    if not (word.isascii() and word.isdecimal() and len(word) <= 19):
        raise ProtocolError(f"configuration: {name}: expected a natural number, found {word[:40]!r}")
    return int(word)


def _block(pairs: Sequence[tuple[str, str]]) -> bytes:
    for key, value in pairs:
        if "\n" in value or "\r" in value:
            raise ValueError(f"{key}: a line break has no place in {value!r}")
    lines = [str(len(pairs)), *(f"{key}={value}" for key, value in pairs)]
    return ("\n".join(lines) + "\n").encode()


def request(form: Form, keep: int, new: Sequence[int], sampling: Sampling, max_tokens: int) -> bytes:
    """A request that keeps ``keep`` cached tokens and appends ``new``, which may not be empty.

    Version 1 keeps either all that is cached or, with ``keep`` 0, nothing.
    """
    if not new:
        raise ValueError("a request needs at least one token")
    if form is Form.KEY_VALUE:
        return _block(
            [
                ("kv_position", str(keep)),
                ("tokens", ",".join(map(str, new))),
                ("temperature", str(float(sampling.temperature))),
                ("top_k", str(sampling.top_k)),
                ("top_p", str(float(sampling.top_p))),
                ("repetition_penalty", str(float(sampling.repetition_penalty))),
                ("rep_penalty_lookback", str(sampling.rep_penalty_lookback)),
                ("max_tokens", str(max_tokens)),
            ]
        )
    values: list[object] = [
        len(new),
        0 if keep else 1,
        float(sampling.temperature),
        sampling.top_k,
        float(sampling.top_p),
        float(sampling.repetition_penalty),
        sampling.rep_penalty_lookback,
        max_tokens,
        *new,
    ]
    return ("\n".join(map(str, values)) + "\n").encode()


QUIT = b"0\n"
"""Ends the worker, in both forms."""


def reply_integer(line: bytes, what: str, limit: int) -> int:
    """The integer that a line of a reply holds, from 0 to below ``limit``."""
    if not _INTEGER.fullmatch(line):
        raise ProtocolError(f"expected {what}, found {line!r}")
    value = int(line)
    if not 0 <= value < limit:
        raise ProtocolError(f"{what} {value} is not from 0 to {limit - 1}")
    return value
