"""Writes GGUF files, the type ids that the `gguf` package does not know included, and packs the ternary and 1-bit blocks."""
import struct

import numpy as np

F32, F16, Q8_0, BF16, TQ1_0, TQ2_0, I2_S, MXFP4, Q1_0, Q2_0, PQ2_0 = 0, 1, 8, 30, 34, 35, 36, 39, 41, 42, 142
ALIGNMENT = 32


class U32(int):
    """A number to be written as u32, which is what counts are."""


class U16(int):
    """A number to be written as u16."""


class I32(int):
    """A number to be written as i32."""


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value) -> bytes:
    match value:
        case bool():
            return struct.pack("<IB", 7, value)
        case U16():
            return struct.pack("<IH", 2, value)
        case I32():
            return struct.pack("<Ii", 5, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
    raise TypeError(f"no GGUF type for {value!r}")


def write(path, metadata: dict, tensors: dict) -> None:
    """`tensors`: name -> (shape with the longest stride first, type id, bytes)."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += _string(key) + _value(value)
    offset, body = 0, b""
    for name, (shape, type_id, data) in tensors.items():
        head += _string(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", n) for n in reversed(shape))
        head += struct.pack("<IQ", type_id, offset)
        body += data + bytes(-len(data) % ALIGNMENT)
        offset = len(body)
    with open(path, "wb") as out:
        out.write(head + bytes(-len(head) % ALIGNMENT) + body)


def i2_s(codes: np.ndarray, scale: float) -> bytes:
    """128 weights in 32 bytes: byte p holds elements p, 32+p, 64+p, 96+p at bits 7:6, 5:4, 3:2, 1:0; the scale follows.

    The 28 bytes behind the scale are undefined in real files, so they are filled with a pattern that is not zero.
    """
    fields = (codes.reshape(-1, 4, 32) + 1).astype(np.uint8)
    packed = fields[:, 0] << 6 | fields[:, 1] << 4 | fields[:, 2] << 2 | fields[:, 3]
    return packed.tobytes() + np.float32(scale).tobytes() + b"\xa5" * 28


def q1_0(weights: np.ndarray) -> tuple[bytes, np.ndarray]:
    """Sign blocks of 128: f16 d, then 16 bytes of bits, lowest first, 1 for +d. Returns the bytes and the values they stand for."""
    blocks = weights.reshape(-1, 128)
    d = np.abs(blocks).mean(axis=1).astype(np.float16)
    bits = blocks >= 0
    data = np.concatenate([d[:, None].view(np.uint8), np.packbits(bits, axis=1, bitorder="little")], axis=1)
    values = np.where(bits, 1.0, -1.0) * d[:, None].astype(np.float32)
    return data.tobytes(), values.astype(np.float32).reshape(weights.shape)


def q2_0(weights: np.ndarray, group: int) -> tuple[bytes, np.ndarray]:
    """Ternary blocks: f16 d, then codes of 2 bits, lowest first, value (code − 1)·d. Returns the bytes and the values."""
    blocks = weights.reshape(-1, group)
    d = np.abs(blocks).mean(axis=1).astype(np.float16)
    codes = np.clip(np.rint(blocks / d[:, None].astype(np.float32)), -1, 1)
    fields = (codes + 1).astype(np.uint8).reshape(-1, group // 4, 4)
    packed = fields[..., 0] | fields[..., 1] << 2 | fields[..., 2] << 4 | fields[..., 3] << 6
    data = np.concatenate([d[:, None].view(np.uint8), packed], axis=1)
    return data.tobytes(), (codes * d[:, None].astype(np.float32)).astype(np.float32).reshape(weights.shape)
