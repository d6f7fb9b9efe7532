#!/usr/bin/env python3
"""Compares the errors of our block encoders with those of llama.cpp's, tensor by tensor.

Needs gguf, numpy and llama_cpp, and for safetensors also safetensors and torch. Build the encoder first:

    cargo build --release -p sterna-kernels --example quantize
    python scripts/compare-quantizers.py target/release/examples/quantize [MODEL.gguf | MODEL.safetensors]...

Tensors of each model, and synthetic ones, are rounded to BF16 and cut into rows of 256, which is
all the same to encoders of blocks. Errors are squared differences, plain and weighted as the
reference quantizers weigh them, as quotients ours / llama.cpp: below 1 ours is closer. Fails if a
weighted error is larger.

`--speed MB` compares the time of one thread over that many megabytes of BF16 instead: CPU seconds
of llama.cpp's quantizer, which also reads and writes files, and of our encoder from f32 in memory.
"""

import argparse
import ctypes
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

# The file type of llama.cpp's quantizer that gives each block type, with `pure`.
TYPES = {"Q4_K": 14, "Q5_K": 16, "Q6_K": 18, "Q4_0": 2, "Q8_0": 7, "Q2_K": 10, "Q3_K": 11}
WIDTH = 256


def bf16(values):
    """The bits of the nearest BF16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widen(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def weights_of(dtype, x):
    """What llama.cpp's quantizer for a type weighs squared errors with; `x` is rows of 256."""
    if dtype in ("Q4_K", "Q5_K"):
        sub = x.reshape(-1, 32)
        rms = np.sqrt((sub.astype(np.float64) ** 2).mean(axis=1, keepdims=True))
        return (rms + np.abs(sub)).reshape(x.shape)
    if dtype in ("Q6_K", "Q3_K"):
        return x.astype(np.float64) ** 2
    if dtype == "Q2_K":
        return np.abs(x).astype(np.float64)
    return np.ones_like(x, dtype=np.float64)


def synthetic():
    rng = np.random.default_rng(7)
    shape = (512, WIDTH)
    gauss = rng.normal(size=shape)
    outliers = np.where(rng.random(shape) < 0.004, 30 * gauss, gauss)
    rows = gauss * np.exp(rng.normal(0, 1, size=(shape[0], 1)))
    return {
        "gauss": 0.02 * gauss,
        "laplace": 0.02 * rng.laplace(size=shape),
        "student": 0.02 * rng.standard_t(3, size=shape),
        "outliers": 0.02 * outliers,
        "row-scales": 0.02 * rows,
        "shifted": 0.02 * (gauss + 3),
        "positive": 0.02 * np.abs(gauss),
        "uniform": rng.uniform(-0.1, 0.1, size=shape),
        "sparse": np.where(rng.random(shape) < 0.1, 0.02 * gauss, 0),
        "tiny": 1e-6 * gauss,
        "huge": 1e3 * gauss,
    }


def model_tensors(path):
    if path.suffix == ".gguf":
        for tensor in gguf.GGUFReader(path).tensors:
            yield tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type)
        return
    from safetensors.torch import load_file

    for name, tensor in load_file(path).items():
        if tensor.is_floating_point():
            yield name, tensor.float().numpy()


def collect(paths):
    """Name to BF16 bits in rows of 256."""
    found = {name: bf16(x.astype(np.float32)) for name, x in synthetic().items()}
    for path in paths:
        for name, x in model_tensors(path):
            flat = x.astype(np.float32).ravel()
            n = flat.size // WIDTH * WIDTH
            if x.ndim == 2 and n >= 8 * WIDTH:
                found[f"{path.stem}/{name}"] = bf16(flat[:n].reshape(-1, WIDTH))
    return found


def write_gguf(path, tensors):
    """A file with as little of a model as the quantizer asks for. Tensors are named by number."""
    writer = gguf.GGUFWriter(path, "llama")
    width = next(iter(tensors.values())).shape[1]
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(width)
    writer.add_head_count(8)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(512)
    for i, bits in enumerate(tensors.values()):
        writer.add_tensor(
            f"blk.{i}.ffn_up.weight", bits, raw_dtype=gguf.GGMLQuantizationType.BF16
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source, target, dtype):
    """llama.cpp's quantizer with one thread; the CPU seconds it took."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype, params.pure = 1, TYPES[dtype], True
    before = resource.getrusage(resource.RUSAGE_SELF)
    failed = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params)
    after = resource.getrusage(resource.RUSAGE_SELF)
    if failed:
        sys.exit(f"llama.cpp could not quantize to {dtype}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def ours(binary, dtype, values, folder, repeat=1):
    """Our blocks, and the CPU seconds of the process that encoded them `repeat` times."""
    values.tofile(folder / "in.f32")
    command = [binary, dtype, str(values.shape[1]), folder / "in.f32", folder / "out.bin"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, str(repeat)], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return np.fromfile(folder / "out.bin", dtype=np.uint8), seconds


def compare(binary, types, tensors, folder, every):
    worst = 0.0
    write_gguf(folder / "in.gguf", tensors)
    for dtype in types:
        quantize(folder / "in.gguf", folder / "out.gguf", dtype)
        reader = gguf.GGUFReader(folder / "out.gguf")
        theirs = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
        kind = gguf.GGMLQuantizationType[dtype]
        quotients = []
        for i, (name, bits) in enumerate(tensors.items()):
            x = widen(bits)
            blocks, _ = ours(binary, dtype, x, folder)
            mine = gguf.dequantize(blocks.reshape(x.shape[0], -1), kind)
            w = weights_of(dtype, x)
            errors = [
                ((y.reshape(x.shape) - x.astype(np.float64)) ** 2)
                for y in (mine, theirs[f"blk.{i}.ffn_up.weight"])
            ]
            plain = [e.sum() for e in errors]
            weighted = [(w * e).sum() for e in errors]
            # Neither has an error where one has none.
            pair = [a / b if b else float(a > 0) for a, b in (weighted, plain)]
            quotients.append(pair)
            if every:
                print(f"{dtype:5} {name:40} weighted {pair[0]:.4f}  plain {pair[1]:.4f}")
        q = np.array(quotients)
        worst = max(worst, q[:, 0].max())
        for label, column in (("weighted", q[:, 0]), ("plain", q[:, 1])):
            print(
                f"{dtype:5} {label:8} {len(column)} tensors: mean {column.mean():.4f},"
                f" best {column.min():.4f}, worst {column.max():.4f}",
                flush=True,
            )
    if worst > 1.0:
        sys.exit("a weighted error is larger than llama.cpp's")


def speed(binary, types, megabytes, folder):
    rng = np.random.default_rng(1)
    rows = megabytes * 1_000_000 // 2 // 4096
    values = 0.02 * rng.standard_t(8, size=(rows, 4096))
    bits = bf16(values.astype(np.float32))
    write_gguf(folder / "in.gguf", {"weights": bits})
    values = widen(bits)
    for dtype in types:
        theirs = quantize(folder / "in.gguf", folder / "out.gguf", dtype)
        # Reading and converting the values is no part of it.
        once, often = (ours(binary, dtype, values, folder, repeat)[1] for repeat in (1, 6))
        mine = (often - once) / 5
        print(
            f"{dtype:5} llama.cpp {values.size / theirs / 1e6:7.1f} M weights/s,"
            f" ours {values.size / mine / 1e6:7.1f}, quotient {theirs / mine:.1f}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("binary", type=Path)
    parser.add_argument("models", type=Path, nargs="*")
    parser.add_argument("--types", default="Q4_K,Q5_K,Q6_K,Q4_0,Q8_0")
    parser.add_argument("--each", action="store_true", help="print every tensor")
    parser.add_argument("--speed", type=int, metavar="MB")
    args = parser.parse_args()
    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    with tempfile.TemporaryDirectory() as folder:
        types = args.types.split(",")
        if args.speed:
            speed(args.binary.resolve(), types, args.speed, Path(folder))
        else:
            compare(args.binary.resolve(), types, collect(args.models), Path(folder), args.each)


if __name__ == "__main__":
    main()
