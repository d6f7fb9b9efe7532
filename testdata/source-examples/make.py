#!/usr/bin/env python3
"""Writes the packages of this folder whose hashes are those of zeros, and checks nothing else.

    testdata/source-examples/make.py

Shards are all zeros, so every hash follows from a length.
"""

import hashlib
import json
from pathlib import Path

HERE = Path(__file__).parent / "rdrr"
MIB = 1 << 20


def zeros(size):
    digest = hashlib.sha256()
    piece = bytes(MIB)
    while size:
        n = min(size, MIB)
        digest.update(piece[:n])
        size -= n
    return digest.hexdigest()


def shards(sizes):
    known = {size: zeros(size) for size in set(sizes)}
    return [
        {
            "index": i,
            "fileName": f"shard_{i:05}.bin",
            "size": size,
            "hash": known[size],
            "hashAlgorithm": "sha256",
        }
        for i, size in enumerate(sizes)
    ]


def dump(value, indent=0):
    """JSON with innermost objects and lists in one line each."""
    pad = "  " * (indent + 1)
    if isinstance(value, dict) and any(isinstance(v, (dict, list)) for v in value.values()):
        if any(isinstance(v, dict) for v in value.values()) or indent == 0:
            rows = [f"{pad}{json.dumps(k)}: {dump(v, indent + 1)}" for k, v in value.items()]
            return "{\n" + ",\n".join(rows) + "\n" + "  " * indent + "}"
    if isinstance(value, list) and any(isinstance(v, dict) for v in value) and indent < 2:
        rows = [pad + dump(v, indent + 1) for v in value]
        return "[\n" + ",\n".join(rows) + "\n" + "  " * indent + "]"
    return json.dumps(value)


def write(name, value):
    (HERE / name).write_text(dump(value) + "\n")


def spans(shard, offset, size, shard_size):
    out = []
    while size:
        n = min(size, shard_size - offset)
        out.append({"shardIndex": shard, "offset": offset, "size": n})
        shard, offset, size = shard + 1, 0, size - n
    return out


def package():
    hidden, ffn, heads, kv_heads, head_dim, vocab = 2304, 9216, 8, 4, 256, 256_000
    layers, shard_size, total = 26, 256 * MIB, 3_400_000_000
    q4_k = lambda rows, cols: rows * cols // 256 * 144
    tensors, groups = {}, {}
    at = 0

    def put(group, name, shape, dtype, size):
        nonlocal at
        at = (at + 4095) // 4096 * 4096
        if at % shard_size + size > shard_size and at % shard_size:
            at = (at // shard_size + 1) * shard_size
        pieces = spans(at // shard_size, at % shard_size, size, shard_size)
        entry = {
            "group": group,
            "shard": pieces[0]["shardIndex"],
            "offset": pieces[0]["offset"],
            "size": size,
            "shape": shape,
            "dtype": dtype,
        }
        if len(pieces) > 1:
            entry["spans"] = pieces
        tensors[name] = entry
        groups.setdefault(group, []).append(name)
        at += size

    put("embed", "model.embed_tokens.weight", [vocab, hidden], "BF16", vocab * hidden * 2)
    at = 5 * shard_size
    for i in range(layers):
        prefix = f"model.layers.{i}."
        for name, rows, cols in [
            ("self_attn.q_proj", heads * head_dim, hidden),
            ("self_attn.k_proj", kv_heads * head_dim, hidden),
            ("self_attn.v_proj", kv_heads * head_dim, hidden),
            ("self_attn.o_proj", hidden, heads * head_dim),
            ("mlp.gate_proj", ffn, hidden),
            ("mlp.up_proj", ffn, hidden),
            ("mlp.down_proj", hidden, ffn),
        ]:
            size = q4_k(rows, cols)
            put(f"layer.{i}", f"{prefix}{name}.weight", [rows, cols], "Q4_K_M", size)
        for name, width in [
            ("self_attn.q_norm", head_dim),
            ("self_attn.k_norm", head_dim),
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("pre_feedforward_layernorm", hidden),
            ("post_feedforward_layernorm", hidden),
        ]:
            put(f"layer.{i}", f"{prefix}{name}.weight", [width], "F32", width * 4)
    at = 10 * shard_size
    put("head", "model.norm.weight", [hidden], "F32", hidden * 4)

    def group(name, names):
        kind = name.split(".")[0]
        where = {
            piece["shardIndex"]
            for tensor in names
            for piece in tensors[tensor].get("spans", [{"shardIndex": tensors[tensor]["shard"]}])
        }
        entry = {
            "type": kind,
            "version": "1.0.0",
            "shards": sorted(where),
            "tensors": names,
            "hash": zeros(sum(tensors[tensor]["size"] for tensor in names)),
        }
        if kind == "layer":
            entry["layerIndex"] = int(name.split(".")[1])
        return entry

    full, rest = divmod(total, shard_size)
    write(
        "package/manifest.json",
        {
            "version": 1,
            "modelId": "gemma-2-2b-it-q4",
            "modelType": "transformer",
            "quantization": "Q4_K_M",
            "quantizationInfo": {
                "weights": "q4_k_m",
                "embeddings": "f16",
                "lmHead": "f16",
                "variantTag": "wq4_k_m-embf16",
            },
            "hashAlgorithm": "sha256",
            "architecture": {
                "numLayers": layers,
                "hiddenSize": hidden,
                "intermediateSize": ffn,
                "numAttentionHeads": heads,
                "numKeyValueHeads": kv_heads,
                "headDim": head_dim,
                "vocabSize": vocab,
                "maxSeqLen": 8192,
                "ropeTheta": 10000,
            },
            "groups": {name: group(name, names) for name, names in groups.items()},
            "shards": shards([shard_size] * full + [rest]),
            "tensorsFile": "tensors.json",
            "tensorCount": len(tensors),
            "totalSize": total,
        },
    )
    write("package/tensors.json", tensors)


def groups():
    names = {
        "embed": "model.embed_tokens.weight",
        "layer.0": "model.layers.0.self_attn.q_proj.weight",
        "layer.0.expert.0": "model.layers.0.mlp.experts.0.gate_proj.weight",
    }
    shard_size = 64 * MIB
    tensors = {}
    for (group, name), shard, offset, shape, dtype, width in zip(
        names.items(),
        (0, 0, 5),
        (0, 32 * MIB, 0),
        ([4096, 4096], [4096, 4096], [1024, 4096]),
        ("F16", "F32", "F16"),
        (2, 4, 2),
    ):
        size = shape[0] * shape[1] * width
        pieces = spans(shard, offset, size, shard_size)
        tensors[name] = {
            "group": group,
            "shard": shard,
            "offset": offset,
            "size": size,
            "shape": shape,
            "dtype": dtype,
        }
        if len(pieces) > 1:
            tensors[name]["spans"] = pieces
    entries = {
        group: {
            "type": {"embed": "embed", "layer.0": "layer"}.get(group, "expert"),
            "version": "1.0.0",
            "shards": {"embed": [0], "layer.0": [0, 1]}.get(group, [5]),
            "tensors": [name],
            "hash": zeros(tensors[name]["size"]),
        }
        for group, name in names.items()
    }
    entries["layer.0"]["layerIndex"] = 0
    entries["layer.0.expert.0"].update(layerIndex=0, expertIndex=0)
    write(
        "groups/manifest.json",
        {
            "version": 1,
            "modelId": "groups",
            "modelType": "mixtral",
            "quantization": "F16",
            "hashAlgorithm": "sha256",
            "architecture": {
                "numLayers": 1,
                "hiddenSize": 4096,
                "intermediateSize": 1024,
                "numAttentionHeads": 32,
                "vocabSize": 4096,
                "maxSeqLen": 8192,
            },
            "groups": entries,
            "shards": shards([shard_size] * 6),
            "tensors": tensors,
            "tensorCount": 3,
            "totalSize": 6 * shard_size,
        },
    )


def lora():
    size, width, rank = 15_728_640, 4096, 32
    matrix = width * rank * 4
    (shard,) = shards([size])
    shard["fileName"] = "lora_weights.rdrr"
    del shard["hashAlgorithm"]
    form = lambda at, shape: {
        "shard": 0,
        "offset": at,
        "size": matrix,
        "shape": shape,
        "dtype": "f32",
    }
    write(
        "lora/manifest.json",
        {
            "version": "1.0",
            "modelId": "functiongemma-270m-react-lora",
            "modelType": "lora",
            "adapterType": "lora",
            "baseModel": "functiongemma-270m-it",
            "quantization": "F32",
            "loraConfig": {
                "rank": rank,
                "alpha": 64,
                "targetModules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            },
            "shards": [shard],
            "tensors": {
                "layers.0.q_proj.lora_a": form(0, [width, rank]),
                "layers.0.q_proj.lora_b": form(matrix, [rank, width]),
            },
        },
    )


def spans_and_shard():
    rows, cols = 128_256, 4096
    size = rows * cols * 2
    write(
        "spans.json",
        {
            "model.embed_tokens.weight": {
                "group": "embed",
                "shard": 0,
                "offset": 0,
                "size": size,
                "shape": [rows, cols],
                "dtype": "BF16",
                "spans": spans(0, 0, size, 64 * MIB),
            }
        },
    )
    (HERE / "shard.json").write_text(json.dumps(shards([64 * MIB])[0], indent=2) + "\n")


package()
groups()
lora()
spans_and_shard()
