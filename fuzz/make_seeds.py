"""Writes the seed corpora from the test data: headers without their tensors, and JSON files.

Run in the repository root: python3 fuzz/make_seeds.py
"""

import glob
import json
import os
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
