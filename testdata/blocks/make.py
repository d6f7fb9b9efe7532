#!/usr/bin/env python3
"""Makes the reference vectors of the block formats in this folder.

Needs numpy, gguf 0.19, torch and transformers (for the packing of Hugging Face BitNet checkpoints),
and llama-cpp-python 0.3.36, whose libggml has the reference quantizers.

  input.f32      16 rows of 256 values: what is encoded
  TYPE.bin       blocks: `input.f32` encoded by the reference, then blocks of random codes
  TYPE.f32       the values of all those blocks by the reference decoder
  hf-10x96.bin   trits packed by transformers, two bits each; hf-10x96.i8 has the trits, [10, 96]

All numbers are little-endian.
"""

import ctypes
import importlib.util
import pathlib

import gguf
import numpy as np

HERE = pathlib.Path(__file__).parent
rng = np.random.default_rng(20260101)
GGML = ctypes.CDLL(
    str(pathlib.Path(importlib.util.find_spec("llama_cpp").origin).parent / "lib/libggml-base.so")
)


def inputs():
    n = 256
    rows = [rng.normal(0, 0.02, n) for _ in range(4)]
    rows += [rng.standard_t(3, n) * 0.05 for _ in range(3)]
    rows.append(np.zeros(n))
    rows.append(np.full(n, 0.73))
    rows.append(np.full(n, -1.25))
    rows.append(rng.integers(-1, 2, n) * 0.0371)  # ternary
    rows.append(rng.uniform(0.5, 3, n))  # all positive
    rows.append(-rng.uniform(0, 1e-3, n))  # all negative and small
    rows.append(np.where(np.arange(n) % 64 == 17, 40.0, rng.normal(0, 0.5, n)))  # outliers
    rows.append(rng.normal(0, 1, n) * np.repeat(2.0 ** np.arange(-8, 8), 16))  # wide range
    rows.append(np.where(np.arange(n) < 128, 0, rng.laplace(0, 1, n)))  # half empty
    return np.array(rows).astype("<f4")


def ggml_encode(name, rows, block_len, block_bytes):
    out = np.zeros(rows.size // block_len * block_bytes, np.uint8)
    getattr(GGML, f"quantize_row_{name}_ref")(
        rows.ctypes.data_as(ctypes.c_void_p),
        out.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(rows.size),
    )
    return out


def ggml_decode(name, blocks, block_len, block_bytes):
    blocks = np.ascontiguousarray(blocks)
    out = np.zeros(blocks.size // block_bytes * block_len, np.float32)
    getattr(GGML, f"dequantize_row_{name}")(
        blocks.ctypes.data_as(ctypes.c_void_p),
        out.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(out.size),
    )
    return out


def f16(block, at):
    return block[:, at : at + 2].copy().view("<f2").astype(np.float32)


def encode_q2_0_g128(rows):
    x = rows.reshape(-1, 128)
    d = np.abs(x).max(axis=1, keepdims=True)
    inv = np.divide(1, d, out=np.zeros_like(d), where=d != 0)
    ratio = x * inv
    codes = (np.sign(ratio) * np.floor(np.abs(ratio) + 0.5) + 1).astype(np.uint8)
    codes = codes.reshape(-1, 32, 4)
    packed = codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6
    return np.concatenate([d.astype("<f2").view(np.uint8), packed], axis=1).ravel()


def decode_q2_0_g128(blocks):
    blocks = blocks.reshape(-1, 34)
    codes = blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    codes = codes.reshape(len(blocks), 128).astype(np.float32) - 1
    return (f16(blocks, 0) * codes).ravel()


def encode_i2_s(rows):
    """The codes of a tensor, 128/32 interleaved; the sign is kept and the scale is not stored."""
    codes = (np.sign(rows) + 1).astype(np.uint8).reshape(-1, 4, 32)
    return (codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]).ravel()


def decode_i2_s(blocks):
    codes = blocks.reshape(-1, 1, 32) >> np.array([6, 4, 2, 0], np.uint8).reshape(1, 4, 1) & 3
    return np.array([-1, 0, 1, 0], np.float32)[codes.ravel()]


def random_blocks(n, size, scales, limit=256):
    """`n` blocks of random bytes with a sane f16 at each offset of `scales`."""
    blocks = rng.integers(0, limit, (n, size), dtype=np.uint8)
    for at in scales:
        blocks[:, at : at + 2] = rng.normal(0, 0.05, (n, 1)).astype("<f2").view(np.uint8)
    return blocks.ravel()


def write(name, data):
    (HERE / name).write_bytes(np.ascontiguousarray(data).tobytes())


def vectors(name, encoded, random, decode, check=None):
    blocks = np.concatenate([encoded.view(np.uint8).ravel(), random])
    values = decode(blocks).astype("<f4").ravel()
    if check is not None:
        other = check(blocks)
        equal = (values.view(np.uint32) == other.view(np.uint32)).mean()
        print(f"{name}: {equal:.4%} of the values bit for bit the same in both references")
        assert np.allclose(values, other, rtol=1e-5, atol=1e-6)
    write(f"{name}.bin", blocks)
    write(f"{name}.f32", values)


rows = inputs()
write("input.f32", rows)
T = gguf.GGMLQuantizationType

vectors("F64", rows.astype("<f8"), np.zeros(0, np.uint8), lambda b: b.view("<f8").astype("<f4"))
vectors("F32", rows, np.zeros(0, np.uint8), lambda b: b.view("<f4"))
halves = np.concatenate([np.arange(0x7C00), np.arange(0x8000, 0xFC00)])[::61].astype("<u2")
vectors("F16", rows.astype("<f2"), halves.view(np.uint8), lambda b: b.view("<f2").astype("<f4"))
vectors(
    "BF16",
    gguf.quants.quantize(rows, T.BF16),
    (rng.integers(0, 0x7F80, 512) | rng.integers(0, 2, 512) << 15).astype("<u2").view(np.uint8),
    lambda b: (b.view("<u2").astype("<u4") << 16).view("<f4"),
)
for name, scales in dict(
    Q4_0=[0], Q4_1=[0, 2], Q5_0=[0], Q5_1=[0, 2], Q8_0=[0], TQ1_0=[52], TQ2_0=[64], MXFP4=[]
).items():
    block_len, size = gguf.GGML_QUANT_SIZES[T[name]]
    vectors(
        name,
        gguf.quants.quantize(rows, T[name]),
        random_blocks(1024 // block_len, size, scales),
        lambda b: gguf.quants.dequantize(b.reshape(1, -1), T[name]),
        lambda b: ggml_decode(name.lower(), b, block_len, size),
    )
for name, scales in dict(
    Q2_K=[80, 82], Q3_K=[108], Q4_K=[0, 2], Q5_K=[0, 2], Q6_K=[208]
).items():
    block_len, size = gguf.GGML_QUANT_SIZES[T[name]]
    vectors(
        name,
        ggml_encode(name[:-1].lower() + "K", rows, block_len, size),
        random_blocks(4, size, scales),
        lambda b: gguf.quants.dequantize(b.reshape(1, -1), T[name]),
        lambda b: ggml_decode(name[:-1].lower() + "K", b, block_len, size),
    )
for name, block_len in dict(q1_0=128, q2_0=64).items():
    vectors(
        name.upper(),
        ggml_encode(name, rows, block_len, 18),
        random_blocks(8, 18, [0]),
        lambda b: ggml_decode(name, b, block_len, 18),
    )
vectors("Q2_0_G128", encode_q2_0_g128(rows), random_blocks(8, 34, [0]), decode_q2_0_g128)
vectors("I2_S", encode_i2_s(rows), random_blocks(8, 32, []), decode_i2_s)

import torch
from transformers.integrations.bitnet import pack_weights

trits = rng.integers(-1, 2, (10, 96)).astype(np.int8)
write("hf-10x96.i8", trits)
write("hf-10x96.bin", pack_weights(torch.from_numpy(trits.astype(np.float32))).numpy())

# BitLinear arithmetic by torch: int8 activations, and float masters ternarised at load.
x = np.concatenate(
    [
        rng.normal(0, 1, (4, 200)),
        rng.standard_t(2, (2, 200)) * 30,
        np.zeros((1, 200)),
        rng.normal(0, 1e-7, (1, 200)),
        rng.integers(-254, 255, (1, 200)) / 2,  # halves: 127 is in the row, so the scale is 1
    ]
).astype("<f4")
x[-1, 0] = 127
t = torch.from_numpy(x)
scale = 127 / t.abs().max(dim=-1, keepdim=True).values.clamp(min=1e-5)
write("activations-9x200.f32", x)
write("activations-9x200.i8", (t * scale).round().clamp(-128, 127).to(torch.int8).numpy())
write("activations-9x200.scale.f32", scale.numpy())

masters = torch.from_numpy(rng.normal(0, 0.03, (24, 256)).astype(np.float32)).to(torch.bfloat16)
multiplier = 1.0 / masters.float().abs().mean().clamp(min=1e-5)
write("masters-24x256.bf16", masters.view(torch.uint16).numpy())
write("masters-24x256.i8", (masters.float() * multiplier).round().clamp(-1, 1).to(torch.int8).numpy())
write("masters-24x256.scale.f32", (1.0 / multiplier).reshape(1).numpy())
