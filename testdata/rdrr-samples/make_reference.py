"""Writes tiny-gemma3-q4k-reference.safetensors: the logits of the values that the package decodes to.

Run here, with gguf, numpy, safetensors, torch and transformers installed. gguf-py decodes the blocks;
rows of 320 columns are stored padded to two blocks of 256.
"""

import json

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

PACKAGE = "tiny-gemma3-q4k"


def tensors():
    manifest = json.load(open(f"{PACKAGE}/manifest.json"))
    shards = [open(f"{PACKAGE}/{shard['filename']}", "rb").read() for shard in manifest["shards"]]
    for name, tensor in manifest["tensors"].items():
        one = {"shardIndex": tensor.get("shard"), "offset": tensor.get("offset"), "size": tensor["size"]}
        pieces = tensor.get("spans") or [one]
        data = b"".join(shards[p["shardIndex"]][p["offset"] : p["offset"] + p["size"]] for p in pieces)
        rows, columns = (tensor["shape"] + [1])[:2]
        if tensor["dtype"] == "F16":
            values = np.frombuffer(data, np.float16).astype(np.float32).reshape(tensor["shape"])
        else:
            blocks = np.frombuffer(data, np.uint8).reshape(-1, 144)
            values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q4_K)
            values = values.reshape(rows, -1)[:, :columns]
        yield name, torch.tensor(np.ascontiguousarray(values))


config = AutoConfig.from_pretrained("source/tiny-gemma3")
# In the dtype that the file names, even the scale of the embeddings is rounded.
config.dtype = torch.float32
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
missing = model.load_state_dict(dict(tensors()), strict=False)
assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys
model.tie_weights()
ids = load_file("source/tiny-gemma3/reference.safetensors")["input_ids"]
with torch.no_grad():
    logits = model(torch.tensor(ids, dtype=torch.long)[None]).logits[0]
save_file({"input_ids": ids, "logits": logits.numpy()}, f"{PACKAGE}-reference.safetensors")
