"""Writes the seed corpora from the test data: headers without their tensors, and JSON files.

Run in the repository root: python3 fuzz/make_seeds.py
"""

import glob
import json
import os
import re
import struct


def gguf_header(data):
    """The bytes before the data section of a GGUF file, with long string arrays cut short."""
    pos = 24
    n_tensors, n_entries = struct.unpack_from("<QQ", data, 8)
    out = bytearray(data[:24])
    size = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

    def string(at):
        return at + 8 + struct.unpack_from("<Q", data, at)[0]

    for _ in range(n_entries):
        start, pos = pos, string(pos)
        kind = struct.unpack_from("<I", data, pos)[0]
        pos += 4
        if kind == 8:
            pos = string(pos)
        elif kind == 9:
            element, n = struct.unpack_from("<IQ", data, pos)
            keep = min(n, 8)
            head = data[start:pos] + struct.pack("<IQ", element, keep)
            pos += 12
            begin = pos
            for i in range(n):
                if i == keep:
                    end = pos
                pos = string(pos) if element == 8 else pos + size[element]
            out += head + data[begin : end if n > keep else pos]
            continue
        else:
            pos += size[kind]
        out += data[start:pos]
    start = pos
    for _ in range(n_tensors):
        pos = string(pos)
        pos += 4 + 8 * struct.unpack_from("<I", data, pos)[0] + 12
    return bytes(out + data[start:pos])


written = set()


def write(target, name, data):
    if (target, data) in written:
        return
    written.add((target, data))
    folder = f"fuzz/corpus/{target}"
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/seed-{name}", "wb") as f:
        f.write(data)


for path in sorted(glob.glob("testdata/*/*.gguf")):
    with open(path, "rb") as f:
        write("gguf", os.path.basename(path), gguf_header(f.read()))
for path in sorted(glob.glob("testdata/**/*.safetensors", recursive=True)):
    with open(path, "rb") as f:
        length = f.read(8)
        header = f.read(struct.unpack("<Q", length)[0])
    if len(header) < 4096:
        write("safetensors", path.removeprefix("testdata/").replace("/", "-"), length + header)
for path in sorted(glob.glob("testdata/**/*config.json", recursive=True)):
    with open(path, "rb") as f:
        write("hf_config", path.removeprefix("testdata/").replace("/", "-"), f.read())
INDEX = b'{"metadata":{"total_size":8},"weight_map":{"a":"model-00001-of-00002.safetensors","b":"../x"}}'
write("safetensors", "index", INDEX)
write("hf_config", "index", INDEX)
write(
    "hf_config",
    "multimodal",
    b'{"model_type":"gemma3","eos_token_id":[1,106],"text_config":{"model_type":"gemma3_text",'
    b'"rope_scaling":{"factor":8.0,"rope_type":"linear"},"sliding_window":1024},"x":[NaN,-Infinity]}',
)
write(
    "hf_config",
    "longrope",
    b'{"rope_scaling":{"type":"su","short_factor":[1.0,1.1],"long_factor":[1,64.5]},"pad_token_id":-1}',
)
write(
    "hf_config",
    "tokenizer",
    b'{"bos_token":{"content":"<s>","__type":"AddedToken"},"model_max_length":1e30,'
    b'"chat_template":[{"name":"default","template":"{{ x }}"}],"added_tokens_decoder":{"7":{"content":"<x>","special":true}}}',
)

with open("testdata/tokenizers/expected.json", encoding="utf-8") as f:
    expected = json.load(f)
for case in expected["made_up"] + expected["decoders"]:
    name = case["name"].replace(" ", "-")
    write("tokenizer_json", name, json.dumps(case["tokenizer"], ensure_ascii=False).encode())
for path in ["testdata/stories260K/hf/tokenizer.json", "testdata/stories260K/tok512.model"]:
    with open(path, "rb") as f:
        write("tokenizer_json", os.path.basename(path), f.read())
write("tokenizer_json", "tiktoken", b"IQ== 0\nIg== 1\nYWE= 2\nYQ== 3\n")

# Both kinds of the JavaScript converter's tokenizers, and every way to write their members.
write(
    "bundled_tokenizer",
    "bpe",
    b'{"type":"bpe","vocab":{"a":0,"b":1,"ab":2,"<s>":3},"vocabSize":4,"merges":["a b"],"scores":null,'
    b'"tokenTypes":[1,1,1,3],"specialTokens":{"bos":3,"eos":null},"addBosToken":true}',
)
write(
    "bundled_tokenizer",
    "unigram",
    '{"type":"unigram","vocab":["<unk>","<s>","</s>","\u2581","a","\u2581a","<0x41>"],"merges":null,'
    '"scores":[0,0,0,-1,-2,-0.5,-9],"tokenTypes":[2,3,3,1,1,1,6],'
    '"specialTokens":{"bos":"<s>","eos":2,"unk":0},"addSpacePrefix":false}'.encode(),
)
write(
    "bundled_tokenizer",
    "pairs",
    '{"vocab":["H","e","l","o","\u0120","He","ll","<|end|>"],"merges":[["H","e"],["l","l"]],'
    '"tokenTypes":[1,1,1,1,1,1,1,4],"specialTokens":{"pad":7,"sep":"<|end|>","cls":0,"mask":1},'
    '"addEosToken":true}'.encode(),
)

with open("testdata/chat-templates/expected.json", encoding="utf-8") as f:
    expected = json.load(f)
messages = b"\0" + json.dumps(expected["conversations"]["system"]["messages"]).encode()
for i, case in enumerate(expected["features"]):
    write("template", f"feature-{i}", case["source"].encode())
for path in sorted(glob.glob("crates/text/src/template/builtin/*.jinja")):
    with open(path, "rb") as f:
        write("template", os.path.basename(path), f.read() + messages)
with open("testdata/chat-templates/huggingface-jinja-e2e.json", encoding="utf-8") as f:
    for i, case in enumerate(json.load(f)):
        write("template", f"model-{i}", case["chat_template"].encode() + messages)
# What once crashed, hung or filled memory.
BIG = "{% set x = 'a' * 1000000 %}"
SELF = "{% set n = namespace() %}{% set n.a = n %}"
HOSTILE = [
    "{% for i in [1] %}{{ loop.cycle() }}{% endfor %}",
    *(SELF + use for use in ["{{ n }}", "{{ n == n }}", "{{ n ~ 'x' }}", "{{ [n, n] | sort }}", "{{ {n: n} | tojson }}"]),
    *("{{ 1" + part * 1000 + " }}" for part in ["+1", " and 1", "|abs", "[0]", ".a", " if 1 else 1", " is odd", "~1"]),
    "{{ " + "not " * 1000 + "1 }}",
    "{{ " + "(" * 60 + "1" + ")" * 60 + " }}",
    "{% if 0 %}" + "{% elif 0 %}" * 300 + "{% endif %}",
    "{% macro m() %}{{ [m()] }}{% endmacro %}{{ m() }}",
    "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}{% endmacro %}{{ m() }}",
    *(BIG + "{{ " + use + " }}" for use in [
        "x | replace('a', x)", "range(1000) | join(x)", "range(1000) | map('replace', '', x) | list", "([x] * 1000) | join",
        "x ~ x ~ x ~ x ~ x", "[x, x] | sort | length", "x.split('a') | length",
    ]),
    "{{ [1] | slice(1000000000000) | list }}{{ [1] | batch(1000000000000, 0) | list }}",
    "{% set x %}{% for i in range(100000) %}{{ 'a' * 10000 }}{% endfor %}{% endset %}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 'a' | indent(1000000000, true) }}",
    BIG + "{% for i in range(100000) %}{% set y = x | upper %}{% endfor %}",
    BIG + "{{ raise_exception(x) }}",
    "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
]
for i, source in enumerate(HOSTILE):
    write("template", f"hostile-{i}", source.encode() + messages)

# Manifests and tensor maps of packages: the samples, cut to a few tensors.
for path in sorted(glob.glob("testdata/rdrr-samples/*/manifest.json")):
    manifest = json.load(open(path))
    name = path.split("/")[-2]
    tensors = manifest.get("tensors")
    if tensors:
        write("rdrr_tensors", name, json.dumps(dict(list(tensors.items())[:4])).encode())
        manifest["tensors"] = dict(list(tensors.items())[:4])
        manifest.pop("tensorCount", None)
    for section in ("execution", "session"):
        manifest.get("inference", {}).pop(section, None)
    manifest.pop("integrityExtensions", None)
    write("rdrr_manifest", name, json.dumps(manifest).encode())

# Every member of a manifest once, and an adapter as the format's description prints it.
HASH = "ab" * 32
TENSORS = {
    "model.embed_tokens.weight": {"group": "embed", "shard": 0, "offset": 0, "size": 8192, "shape": [16, 256],
        "dtype": "F16", "role": "embedding", "spans": [{"shardIndex": 0, "offset": 0, "size": 4096},
        {"shardIndex": 1, "offset": 0, "size": 4096}]},
    "model.layers.0.mlp.experts.1.up_proj.weight": {"group": "layer.0.expert.1", "shard": 1, "offset": 4096,
        "size": 288, "shape": [1, 320], "dtype": "q4_k_m", "layout": "row", "storage": {"packing": "q4k"}},
    "model.layers.0.self_attn.q_proj.weight": {"group": "head", "shard": 1, "offset": 8192, "size": 24,
        "shape": [3, 2], "originalShape": [2, 3], "dtype": "f32", "layout": "column"},
}
GROUPS = {
    "embed": {"type": "embed", "version": "1.0.0", "shards": [0, 1], "hash": HASH,
        "tensors": ["model.embed_tokens.weight"]},
    "layer.0.expert.1": {"type": "expert", "version": "1.0.0", "shards": [1], "hash": HASH, "layerIndex": 0,
        "expertIndex": 1, "tensors": ["model.layers.0.mlp.experts.1.up_proj.weight"]},
    "head": {"type": "head", "version": "1.0.0", "shards": [1], "hash": HASH,
        "tensors": ["model.layers.0.self_attn.q_proj.weight"]},
}
EVERY = {
    "version": "1.0", "modelId": "every", "modelType": "mixtral", "quantization": "Q4_K_M",
    "quantizationInfo": {"weights": "q4_k_m", "embeddings": "f16", "i2sLayout": "block128", "later": 1},
    "architecture": {"numLayers": 1, "hiddenSize": 256, "intermediateSize": 320, "numAttentionHeads": 2,
        "vocabSize": 16, "maxSeqLen": 64, "ropeTheta": 1e4},
    "config": {"model_type": "mixtral", "num_local_experts": 2},
    "moeConfig": {"numExperts": 2, "numExpertsPerToken": 1, "expertShardMap": {"0_1": [1]}},
    "groups": GROUPS,
    "shards": [{"index": 0, "filename": "shard_00000.bin", "size": 4096, "blake3": HASH, "offset": 0},
        {"index": 1, "fileName": "shard_00001.bin", "size": 8216, "hash": HASH, "hashAlgorithm": "blake3"}],
    "tensors": TENSORS, "tensorCount": 3, "totalSize": 12312,
    "tokenizer": {"type": "sentencepiece", "sentencepieceModel": "tokenizer.model", "vocabSize": 16},
    "runtimeOptimizations": {"preferredKernels": {"matmul": "q4_fused"}, "workgroupOverrides": {"rmsnorm": [256, 1, 1]},
        "disableFeatures": ["subgroups"], "forceF32Accumulation": True, "attentionTier": "basic",
        "targetDevice": "apple-m1"},
    "blake3Full": HASH, "eos_token_id": [1, 2], "metadata": {"source": "x"},
    "integrityExtensions": {"contractVersion": 1,
        "blockMerkle": {"blockSize": 1048576, "roots": {"model.embed_tokens.weight": "sha256:" + HASH}},
        "shardBlocks": {"blockSize": 4096, "hashes": [[HASH], [HASH, HASH, HASH]]}},
}
LORA = {
    "version": "1.0", "modelId": "lora", "modelType": "lora", "adapterType": "lora", "baseModel": "base",
    "quantization": "F32", "loraConfig": {"rank": 2, "alpha": 4, "targetModules": ["q_proj"]},
    "shards": [{"index": 0, "fileName": "lora_weights.rdrr", "size": 96, "hash": HASH}],
    "tensors": {"layers.0.q_proj.lora_a": {"shard": 0, "offset": 0, "size": 64, "shape": [8, 2], "dtype": "f32"},
        "layers.0.q_proj.lora_b": {"shard": 0, "offset": 64, "size": 32, "shape": [2, 4], "dtype": "f32"}},
}
write("rdrr_manifest", "every", json.dumps(EVERY).encode())
write("rdrr_manifest", "lora", json.dumps(LORA).encode())
write("rdrr_tensors", "every", json.dumps(TENSORS).encode())
write("rdrr_tensors", "lora", json.dumps(LORA["tensors"]).encode())

# The files of engine bundles, which a page of the documentation prints, and manifests of both forms.
dumps = open("docs/formats/engine-bundle.md").read().split("```text\n")[1:]
dumps = [
    b"".join(bytes.fromhex(line[6:53]) for line in dump.split("```")[0].splitlines()) for dump in dumps
]
write("bundle_manifest", "sections", dumps[0])
write("bundle_tensors", "tensors", dumps[1])
write("bundle_tensors", "rope", dumps[2])
write("bundle_lora", "one", dumps[3])
write("bundle_manifest", "version-1", dumps[0][: 9 + 2 * 55])
FLOATS = struct.pack("<BIIHQQ", 2, 1, 2, 0, 80, 4) + struct.pack("<BIIHQQ", 0, 3, 1, 0, 84, 12)
ADAPTER = struct.pack("<IId", 1, 7, 2.0) + b"\0\0\1" + FLOATS + bytes(4)
NO_TENSORS = struct.pack("<HH", 1, 1) + b"m" + struct.pack("<I", 0)
write("bundle_manifest", "adapter", NO_TENSORS + struct.pack("<I", 0) + ADAPTER)
write("bundle_manifest", "adapter-version-1", NO_TENSORS + ADAPTER)
ACTIONS = [(0, 2), (1, 2), (2, 1), (3, 4), (3, 3), (4, 0), (5, 0), (6, 0), (7, 0)]
ENTRIES = [
    struct.pack("<BBIIIIHQQBHQQ", action, dtype, 2, 3, 2, 32, 0, 9, 6 * [4, 2, 2, 1, 1][dtype], 0, 0, 0, 0)
    for action, dtype in ACTIONS
]
EVERY_ACTION = NO_TENSORS[:5] + struct.pack("<I", len(ENTRIES)) + b"".join(ENTRIES)
write("bundle_manifest", "every-action", EVERY_ACTION)

# What is said to a worker in the recorded sessions. The first byte tells the forms of the protocol apart.
for path in sorted(glob.glob("crates/cli/tests/golden/worker/*.txt")):
    with open(path, encoding="utf-8") as f:
        lines = f.read().splitlines()
    said = b"\0" if any(line.startswith("$") and "--config" in line for line in lines) else b"\1"
    for line in lines:
        if not line.startswith("< "):
            continue
        repeated = re.match(r"< \*(\d+) (.*)", line)
        n, text = (min(int(repeated[1]), 8), repeated[2]) if repeated else (1, line[2:])
        end = "" if text.endswith("\\") else "\n"
        said += (text.removesuffix("\\") + end).encode().decode("unicode_escape").encode("latin-1") * n
    write("worker_protocol", os.path.basename(path).removesuffix(".txt"), said)

# What servers answer to a request for a part of a file of 100 bytes, or for all of it. The first byte is the
# size of requests.
CONTENT = bytes(range(100))
HEADS = {
    "part": "206 Partial Content\nContent-Range: bytes 0-39/100\nContent-Length: 40\nETag: \"a\"",
    "part-of-unknown": "206 Partial Content\nContent-Range: bytes 0-39/*",
    "whole": "200 OK\nContent-Length: 100\nContent-Type: application/octet-stream",
    "whole-uncounted": "200 OK\nETag: W/\"a\"",
    "page": "200 OK\nContent-Type: text/html; charset=utf-8",
    "packed": "200 OK\nContent-Encoding: gzip",
    "busy": "503 Busy\nRetry-After: 7",
    "busy-until": "429 Busy\nRetry-After: Sun, 06 Nov 1994 08:49:37 GMT\nDate: Sun, 06 Nov 1994 08:49:07 GMT",
    "gone": "404 Not Found",
    "unsatisfiable": "416 Range Not Satisfiable\nContent-Range: bytes */100",
    "lie": "206 Partial Content\nContent-Range: bytes 10-18446744073709551615/100",
}
for name, head in HEADS.items():
    for n_bytes in (40, 255):
        body = CONTENT if n_bytes == 255 else CONTENT[:n_bytes]
        write("http_head", f"{name}-{n_bytes}", bytes([n_bytes]) + f"HTTP/1.1 {head}\n\n".encode() + body)

HEX = "00112233445566778899aabbccddeeff" * 2
FILES = {
    "manifest.json": {"algorithm": "sha256", "digest": HEX, "size": 2},
    "shards/s.bin": {"algorithm": "blake3", "digest": HEX[::-1], "size": 10},
}
INDEX = {"version": 1, "name": "tiny", "source": "https://example.org/tiny", "published": 1_700_000_000, "files": FILES}
GROUPS = [{"algorithm": "sha256", "digest": HEX, "pieces": [["shards/s.bin", 1, 4], ["shards/s.bin", 8, 2]]}]
LARGE = {name: dict(FILES["manifest.json"], digest=name * 64, size=2**64 - 1) for name in "ab"}
write("store_index", "files", json.dumps(INDEX).encode())
write("store_index", "groups", json.dumps(dict(INDEX, signer="me", groups=GROUPS)).encode())
write("store_index", "too-large", json.dumps(dict(INDEX, files=LARGE)).encode())
write("store_index", "far-future", json.dumps(dict(INDEX, published=2**64 - 1)).encode())

# The signatures of the file "test" in minisign's documentation, their key, and a secret key without password.
with open("crates/delivery/tests/sign.rs", encoding="utf-8") as f:
    SIGN = f.read()
for name, text in re.findall(r'const (PREHASHED|LEGACY): &str = "(.*?)";', SIGN, re.S):
    write("minisign", name.lower(), text.replace("\\t", "\t").encode())
KEY = re.search(r'const KEY: &str = "(.*?)";', SIGN)[1]
write("minisign", "public", KEY.encode())
write("minisign", "public-file", f"untrusted comment: minisign public key\n{KEY}\n".encode())

# Receipts, and ones with what those of the test data lack; the digests needn't be right.
for path in sorted(glob.glob("testdata/receipts/*.json")):
    with open(path, "rb") as f:
        write("receipt", os.path.basename(path), f.read())
with open("testdata/receipts/greedy.json", encoding="utf-8") as f:
    GREEDY = json.load(f)
ADAPTER = {"name": "red", "blake3": HEX, "scale": -0.5, "dtype": "F16"}
SHORT = {"answer": [], "logits": dict(GREEDY["logits"], steps=[])}
for name, change in {
    "adapters": {"adapters": [ADAPTER, dict(ADAPTER, dtype=None)]},
    "gpu": {"machine": dict(GREEDY["machine"], device="gpu", name="some (Vulkan, 1.0)")},
    "banned": {"sampling": dict(GREEDY["sampling"], logit_bias=[[3, None], [9, 1.5]], repeat_last_n=None, seed=str(2**64 - 1))},
    "converted": {"settings": dict(GREEDY["settings"], head="Q6_K", i2s_layout="block64", activations="f32")},
    "empty": dict(SHORT, end={"reason": "max_tokens"}, max_tokens=0),
    "stopped": dict(SHORT, end={"reason": "stop_string"}, max_tokens=None),
    "full": dict(SHORT, end={"reason": "context_full"}, settings=dict(GREEDY["settings"], context=len(GREEDY["prompt"]) - 1)),
    "signed": {"signature": "untrusted comment: x\nRUQ=\ntrusted comment: sterna receipt\nAA==\n"},
    "later": {"receipt": 2},
}.items():
    write("receipt", name, json.dumps(dict(GREEDY, **change)).encode())

# Deltas, one part of each kind; what is coded is no coder's, and decoded all the same. Others are in the archive.
DIGESTS = b"\0" + b"\1" * 32 + b"\1" + b"\2" * 32


def delta(parts):
    head = b"STDELTA\1" + DIGESTS + struct.pack("<QI", sum(part[3] for part in parts), len(parts))
    table = b"".join(struct.pack("<BQQQQ", *part[:4], len(part[4])) for part in parts)
    return head + table + b"".join(part[4] for part in parts)


CODED = bytes(i * 89 % 251 for i in range(64))
PARTS = [(0, 0, 0, 7, b""), (1, 0, 0, 5, b"bytes"), (2, 64, 32, 96, CODED), (3, 52, 2, 108, CODED), (4, 2, 0, 64, CODED)]
for name, parts in {"kinds": PARTS, **{f"kind-{part[0]}": [part] for part in PARTS}, "large": [(0, 0, 0, 2**20, b"")]}.items():
    write("delta", name, delta(parts))
LISTED = {"group": "layer.0", "base": f"sha256:{HEX}", "target": f"blake3:{HEX}", "file": "d.bin", "size": 7, "hash": f"sha256:{HEX}"}
write("delta", "list", json.dumps({"version": 1, "deltas": [LISTED, LISTED]}).encode())
