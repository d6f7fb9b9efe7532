#!/usr/bin/env python3
"""Write GGUF models of random weights in the shapes of real mixtures and models with states, for benchmarks.

    scripts/synth-models.py --shape SHAPE [--type q4_k|q4_k_m|q6_k|q8_0|q4_0|q2_0|pq2_0] OUT.gguf

Shapes: Llama-3.2-1B (llama), Llama-3-8B (llama8b), Qwen3-0.6B (qwen3), OLMoE-1B-7B (olmoe; 64 experts, 8 of them a token),
Mamba2-1.3B (mamba2), LFM2-1.2B (lfm2), Qwen3.5-2B (qwen35). Matrices are random blocks of the type, embeddings and the
head Q6_K, but of PQ2_0, as published files have them (without a rotation: it takes no part in the speed of products).
Of q4_k_m, half of the matrices for values and of those that narrow the feed-forward network are Q6_K, the others Q4_K.
Answers are nonsense, at the speed of the real model. Needs the packages gguf and numpy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

# Of a type: elements and bytes of a block, and the places of f16 scales in it, with what weights of about 1 need.
BLOCKS: dict[str, tuple[int, int, int, list[tuple[int, float]]]] = {
    "q4_k": (Type.Q4_K, 256, 144, [(0, 1 / 256), (2, 1 / 32)]),
    "q6_k": (Type.Q6_K, 256, 210, [(208, 1 / 2048)]),
    "q8_0": (Type.Q8_0, 32, 34, [(0, 1 / 64)]),
    "q4_0": (Type.Q4_0, 32, 18, [(0, 1 / 4)]),
    "q2_0": (42, 64, 18, [(0, 1.0)]),
    "pq2_0": (142, 128, 34, [(0, 1.0)]),
}

# What the package doesn't know yet.
for code, length, size, _ in BLOCKS.values():
    gguf.GGML_QUANT_SIZES.setdefault(code, (length, size))


class Writer:
    """A GGUF file with random tensors."""

    def __init__(self, path: Path, arch: str, dtype: str) -> None:
        self.file = gguf.GGUFWriter(path, arch)
        self.arch = arch
        self.dtype = dtype
        self.rng = np.random.default_rng(1)
        self.pool = self.rng.integers(0, 256, 1 << 24, dtype=np.uint8)

    def key(self, name: str, value: object) -> None:
        """A key of the architecture."""
        file, key = self.file, f"{self.arch}.{name}"
        add: Callable[[str, object], None]
        if isinstance(value, list):
            add = file.add_array
        elif isinstance(value, float):
            add = file.add_float32
        else:
            add = file.add_uint32
        add(key, value)

    def matrix(self, name: str, rows: int, columns: int, dtype: str | None = None, many: int = 0) -> None:
        """A matrix, or `many` of them, of random blocks that scale rows to about 1."""
        code, length, size, scales = BLOCKS[dtype or self.type_of(name)]
        n = rows * columns * max(many, 1) // length
        start = int(self.rng.integers(0, 4096))
        data = np.resize(self.pool[start:], n * size).reshape(n, size).copy()
        for at, scale in scales:
            value = np.array([scale / columns**0.5], np.float16).view(np.uint8)
            data[:, at : at + 2] = value
        shape = [many] * (many > 0) + [rows, columns // length * size]
        self.file.add_tensor(name, data.reshape(shape), raw_dtype=code)

    def type_of(self, name: str) -> str:
        """The type of a matrix of a layer: of Q4_K_M, the first and last eighth and every third between are finer."""
        if self.dtype != "q4_k_m":
            return self.dtype
        layer = int(name.split(".")[1])
        eighth = self.layers // 8
        is_finer = layer < eighth or layer >= 7 * self.layers // 8 or (layer - eighth) % 3 == 2
        return "q6_k" if is_finer and ("attn_v" in name or "ffn_down" in name) else "q4_k"

    def floats(self, name: str, shape: list[int], value: float = 1.0) -> None:
        """Floats about `value`."""
        data = value + 0.02 * self.rng.standard_normal(shape)
        self.file.add_tensor(name, data.astype(np.float32))

    def common(self, hidden: int, layers: int, vocabulary: int, eps: float) -> None:
        """What all shapes have."""
        self.layers = layers
        self.key("context_length", 32768)
        self.key("embedding_length", hidden)
        self.key("block_count", layers)
        self.key("attention.layer_norm_rms_epsilon", eps)
        outer = "pq2_0" if self.dtype == "pq2_0" else "q6_k"
        self.matrix("token_embd.weight", vocabulary, hidden, outer)
        self.matrix("output.weight", vocabulary, hidden, outer)
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
        letters += ["ab"]
        tokens = letters + [f"<t{i}>" for i in range(len(letters), vocabulary)]
        control = gguf.TokenType.CONTROL
        kinds = [gguf.TokenType.NORMAL] * len(letters) + [control] * (vocabulary - len(letters))
        self.file.add_tokenizer_model("gpt2")
        self.file.add_tokenizer_pre("llama-bpe")
        self.file.add_token_list(tokens)
        self.file.add_token_types(kinds)
        self.file.add_token_merges(["a b"])
        self.file.add_bos_token_id(len(letters))
        self.file.add_eos_token_id(len(letters) + 1)
        self.file.add_add_bos_token(False)

    def attention(self, at: str, hidden: int, heads: int, kv: int, dim: int, gate: int = 1) -> None:
        """Projections of attention."""
        self.matrix(f"{at}attn_q.weight", gate * heads * dim, hidden)
        self.matrix(f"{at}attn_k.weight", kv * dim, hidden)
        self.matrix(f"{at}attn_v.weight", kv * dim, hidden)
        self.matrix(f"{at}attn_output.weight", hidden, heads * dim)

    def network(self, at: str, hidden: int, width: int) -> None:
        """A gated feed-forward network."""
        self.matrix(f"{at}ffn_gate.weight", width, hidden)
        self.matrix(f"{at}ffn_up.weight", width, hidden)
        self.matrix(f"{at}ffn_down.weight", hidden, width)

    def finish(self) -> None:
        """Writes the file."""
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def dense(w: Writer, hidden: int, layers: int, width: int, heads: int, dim: int, vocabulary: int, norms: bool) -> None:
    """Layers of attention, with norms of heads or without, and a gated network."""
    w.common(hidden, layers, vocabulary, 1e-5)
    for name, value in {
        "feed_forward_length": width, "attention.head_count": heads, "attention.head_count_kv": 8,
        "attention.key_length": dim, "attention.value_length": dim,
        "rope.freq_base": 500000.0, "rope.dimension_count": dim, "vocab_size": vocabulary,
    }.items():
        w.key(name, value)
    w.floats("output_norm.weight", [hidden])
    for i in range(layers):
        at = f"blk.{i}."
        w.floats(f"{at}attn_norm.weight", [hidden])
        w.floats(f"{at}ffn_norm.weight", [hidden])
        w.attention(at, hidden, heads, 8, dim)
        if norms:
            w.floats(f"{at}attn_q_norm.weight", [dim])
            w.floats(f"{at}attn_k_norm.weight", [dim])
        w.network(at, hidden, width)


def llama(w: Writer) -> None:
    """Llama-3.2-1B."""
    dense(w, 2048, 16, 8192, 32, 64, 128256, norms=False)


def llama8b(w: Writer) -> None:
    """Llama-3-8B."""
    dense(w, 4096, 32, 14336, 32, 128, 128256, norms=False)


def qwen3(w: Writer) -> None:
    """Qwen3-0.6B."""
    dense(w, 1024, 28, 3072, 16, 128, 151936, norms=True)


def olmoe(w: Writer) -> None:
    """OLMoE-1B-7B."""
    hidden, layers, experts, width = 2048, 16, 64, 1024
    w.common(hidden, layers, 50304, 1e-5)
    for name, value in {
        "feed_forward_length": width, "attention.head_count": 16, "attention.head_count_kv": 16,
        "rope.freq_base": 10000.0, "expert_count": experts, "expert_used_count": 8,
    }.items():
        w.key(name, value)
    w.floats("output_norm.weight", [hidden])
    for i in range(layers):
        at = f"blk.{i}."
        for norm in ["attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"]:
            w.floats(f"{at}{norm}.weight", [hidden])
        w.attention(at, hidden, 16, 16, 128)
        w.floats(f"{at}ffn_gate_inp.weight", [experts, hidden], 0.0)
        w.matrix(f"{at}ffn_gate_exps.weight", width, hidden, many=experts)
        w.matrix(f"{at}ffn_up_exps.weight", width, hidden, many=experts)
        w.matrix(f"{at}ffn_down_exps.weight", hidden, width, many=experts)


def mamba2(w: Writer) -> None:
    """Mamba2-1.3B."""
    hidden, layers, inner, state, heads, groups = 2048, 48, 4096, 128, 64, 1
    w.common(hidden, layers, 50288, 1e-5)
    for name, value in {
        "feed_forward_length": 0, "attention.head_count": 0, "ssm.conv_kernel": 4, "ssm.inner_size": inner,
        "ssm.state_size": state, "ssm.time_step_rank": heads, "ssm.group_count": groups,
    }.items():
        w.key(name, value)
    w.floats("output_norm.weight", [hidden])
    channels = inner + 2 * groups * state
    for i in range(layers):
        at = f"blk.{i}."
        w.floats(f"{at}attn_norm.weight", [hidden])
        w.matrix(f"{at}ssm_in.weight", inner + channels + heads, hidden)
        w.floats(f"{at}ssm_conv1d.weight", [channels, 4], 0.2)
        w.floats(f"{at}ssm_conv1d.bias", [channels], 0.0)
        w.floats(f"{at}ssm_dt.bias", [heads], -3.0)
        w.floats(f"{at}ssm_a", [heads, 1], -1.0)
        w.floats(f"{at}ssm_d", [heads, 1])
        w.floats(f"{at}ssm_norm.weight", [groups, inner // groups])
        w.matrix(f"{at}ssm_out.weight", hidden, inner)


def lfm2(w: Writer) -> None:
    """LFM2-1.2B."""
    hidden, layers, width = 2048, 16, 8192
    attends = [2, 5, 8, 10, 12, 14]
    w.common(hidden, layers, 65536, 1e-5)
    for name, value in {
        "feed_forward_length": width, "attention.head_count": 32, "rope.freq_base": 1000000.0, "vocab_size": 65536,
        "attention.head_count_kv": [8 if i in attends else 0 for i in range(layers)], "shortconv.l_cache": 3,
    }.items():
        w.key(name, value)
    w.floats("token_embd_norm.weight", [hidden])
    for i in range(layers):
        at = f"blk.{i}."
        w.floats(f"{at}attn_norm.weight", [hidden])
        w.floats(f"{at}ffn_norm.weight", [hidden])
        w.network(at, hidden, width)
        if i in attends:
            w.attention(at, hidden, 32, 8, 64)
            w.floats(f"{at}attn_q_norm.weight", [64])
            w.floats(f"{at}attn_k_norm.weight", [64])
        else:
            w.floats(f"{at}shortconv.conv.weight", [hidden, 3], 0.03)
            w.matrix(f"{at}shortconv.in_proj.weight", 3 * hidden, hidden)
            w.matrix(f"{at}shortconv.out_proj.weight", hidden, hidden)


def qwen35(w: Writer) -> None:
    """Qwen3.5-2B."""
    hidden, layers, width, heads, kv, dim = 2048, 24, 6144, 8, 2, 256
    key_heads, value_heads, state = 16, 16, 128
    inner = value_heads * state
    w.common(hidden, layers, 151936, 1e-6)
    for name, value in {
        "feed_forward_length": width, "attention.head_count": heads, "attention.head_count_kv": kv,
        "attention.key_length": dim, "attention.value_length": dim, "rope.freq_base": 10000000.0,
        "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0], "ssm.conv_kernel": 4,
        "ssm.state_size": state, "ssm.group_count": key_heads, "ssm.time_step_rank": value_heads,
        "ssm.inner_size": inner, "full_attention_interval": 4,
    }.items():
        w.key(name, value)
    w.floats("output_norm.weight", [hidden])
    channels = inner + 2 * key_heads * state
    for i in range(layers):
        at = f"blk.{i}."
        w.floats(f"{at}attn_norm.weight", [hidden])
        w.floats(f"{at}post_attention_norm.weight", [hidden])
        w.network(at, hidden, width)
        if i % 4 == 3:
            w.attention(at, hidden, heads, kv, dim, gate=2)
            w.floats(f"{at}attn_q_norm.weight", [dim])
            w.floats(f"{at}attn_k_norm.weight", [dim])
        else:
            w.floats(f"{at}ssm_a", [value_heads], -1.0)
            w.floats(f"{at}ssm_conv1d.weight", [channels, 4], 0.2)
            w.floats(f"{at}ssm_dt.bias", [value_heads], -3.0)
            w.matrix(f"{at}ssm_alpha.weight", value_heads, hidden)
            w.matrix(f"{at}ssm_beta.weight", value_heads, hidden)
            w.matrix(f"{at}attn_qkv.weight", channels, hidden)
            w.matrix(f"{at}attn_gate.weight", inner, hidden)
            w.floats(f"{at}ssm_norm.weight", [state])
            w.matrix(f"{at}ssm_out.weight", hidden, inner)


SHAPES = {"llama": llama, "llama8b": llama8b, "qwen3": qwen3, "olmoe": olmoe, "mamba2": mamba2, "lfm2": lfm2, "qwen35": qwen35}


def main() -> int:
    """Runs what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--type", choices=[*BLOCKS, "q4_k_m"], default="q4_k")
    args = parser.parse_args()
    writer = Writer(args.out, args.shape.removesuffix("8b"), args.type)
    SHAPES[args.shape](writer)
    writer.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
