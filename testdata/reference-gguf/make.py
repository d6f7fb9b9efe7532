#!/usr/bin/env python3
"""Makes tiny GGUF models of every family with reference logits by transformers, and checks them against llama.cpp.

    make.py [NAME...]

The conventions (names, permutation, norm offset, keys) are those of llama.cpp's converter. Wherever llama.cpp can run
the model, its logits from an f32 copy of the file must agree with transformers'; the table that the run prints is in README.md.
Needs what ../reference-variants/common.py needs, and gguf and llama-cpp-python.
"""
import importlib.util
import math
import shutil
import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

HERE = Path(__file__).resolve().parent
VARIANTS = HERE.parent / "reference-variants"
sys.path.insert(0, str(VARIANTS))

import common as c  # noqa: E402
import ggufio as g  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

_spec = importlib.util.spec_from_file_location("variants", VARIANTS / "make.py")
v = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(v)

# --- from Hugging Face to GGUF --------------------------------------------------------------------------------------

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.attn_sub_norm": "attn_sub_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
}
GEMMA_NAMES = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
               "post_feedforward_layernorm": "post_ffw_norm"}
ARCH = {"mistral": "llama", "gemma3_text": "gemma3", "bitnet": "bitnet-b1.58"}
PERMUTED = ("llama", "smollm3")


def gguf_name(hf_name: str, arch: str) -> str:
    stem, _, ending = hf_name.rpartition(".")
    names = NAMES | (GEMMA_NAMES if arch.startswith("gemma") else {})
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{names[part]}.{ending}"
    return f"{names[stem]}.{ending}"


def permute(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of each head from (half, i) to (i, half): rope pairs become neighbours."""
    return rows.reshape(n_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def unpermute(rows: np.ndarray, n_heads: int) -> np.ndarray:
    return rows.reshape(n_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def heads_of(name: str, config: dict) -> int | None:
    if "q_proj" in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if "k_proj" in name else None


def values_for_gguf(state: dict, config: dict, arch: str) -> dict[str, np.ndarray]:
    """Every tensor under its GGUF name, with the values that the file is to hold, in f32."""
    out = {}
    for name, tensor in state.items():
        value = tensor.float().numpy()
        heads = heads_of(name, config)
        if arch in PERMUTED and heads:
            value = permute(value, heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        out[gguf_name(name, arch)] = np.ascontiguousarray(value)
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") == "llama3":
        out["rope_freqs.weight"] = llama3_factors(config)
    if rope.get("rope_type") == "longrope":
        out["rope_factors_long.weight"] = np.array(rope["long_factor"], np.float32)
        out["rope_factors_short.weight"] = np.array(rope["short_factor"], np.float32)
    return out


def head_dim(config: dict) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def llama3_factors(config: dict) -> np.ndarray:
    rope, dim = config["rope_parameters"], head_dim(config)
    old, low, high, factor = (rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "factor"))
    out = []
    for i in range(0, dim, 2):
        wavelen = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        if wavelen < old / high:
            out.append(1.0)
        elif wavelen > old / low:
            out.append(factor)
        else:
            smooth = (old / wavelen - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def metadata(config: dict, arch: str, file_type: int, more: dict) -> dict:
    rope = config.get("rope_parameters", {"rope_type": "default", "rope_theta": 10000.0})
    full = rope.get("full_attention", rope)
    dim = head_dim(config)
    out = {
        "general.architecture": arch, "general.name": "reference", "general.file_type": file_type,
        f"{arch}.block_count": config["num_hidden_layers"], f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"], f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-5 if config["model_type"] in ("phi3", "bitnet") else 1e-6)),
        f"{arch}.rope.freq_base": float(full["rope_theta"]),
    }
    if arch in ("llama", "smollm3", "bitnet", "bitnet-b1.58"):
        out[f"{arch}.vocab_size"] = config["vocab_size"]
        out[f"{arch}.rope.dimension_count"] = dim
    if "head_dim" in config:
        out[f"{arch}.attention.key_length"] = out[f"{arch}.attention.value_length"] = dim
    kind = full["rope_type"]
    if kind in ("linear", "yarn"):
        out[f"{arch}.rope.scaling.type"] = kind
        out[f"{arch}.rope.scaling.factor"] = float(full["factor"])
    if kind == "yarn":
        out[f"{arch}.rope.scaling.original_context_length"] = full["original_max_position_embeddings"]
        for key in ("beta_fast", "beta_slow"):
            if key in full:
                out[f"{arch}.rope.scaling.yarn_{key}"] = float(full[key])
    if arch == "phi3":
        original = config.get("original_max_position_embeddings", 4096)
        out[f"{arch}.rope.scaling.original_context_length"] = original
        out[f"{arch}.rope.dimension_count"] = int(dim * full.get("partial_rotary_factor", 1.0))
        out[f"{arch}.attention.sliding_window"] = config.get("sliding_window") or 0
        if kind == "longrope":
            scale = config["max_position_embeddings"] / original
            out[f"{arch}.rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    if arch.startswith("gemma"):
        out[f"{arch}.attention.sliding_window"] = config["sliding_window"]
        if config.get("attn_logit_softcapping"):
            out[f"{arch}.attn_logit_softcapping"] = float(config["attn_logit_softcapping"])
        if config.get("final_logit_softcapping"):
            out[f"{arch}.final_logit_softcapping"] = float(config["final_logit_softcapping"])
    if arch == "gemma3" and rope["sliding_attention"]["rope_theta"] != 10000.0:
        out[f"{arch}.rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
    return out | more


def encode(values: dict, type_of) -> dict:
    """GGUF tensors; `type_of(name)` gives the type id of a matrix. Vectors stay f32."""
    out = {}
    for name, value in values.items():
        type_id = type_of(name) if value.ndim == 2 else g.F32
        if type_id == g.F32:
            data = value.astype(np.float32).tobytes()
        elif type_id == g.F16:
            data = value.astype(np.float16).tobytes()
        elif type_id == g.I2_S:
            multiplier = float(np.abs(value).max())
            data = g.i2_s(np.rint(value / multiplier).astype(np.int8), multiplier)
        elif type_id == g.Q1_0:
            data, _ = g.q1_0(value)
        elif type_id in (g.Q2_0, g.PQ2_0):
            data, _ = g.q2_0(value, group_of(type_id))
        else:
            data = gguf.quants.quantize(value.astype(np.float32), gguf.GGMLQuantizationType(type_id)).tobytes()
        out[name] = (value.shape, type_id, data)
    return out


def group_of(type_id: int) -> int:
    return GROUP if type_id == g.Q2_0 else 128


GROUP = 64  # of Q2_0 in the file being made: 64 upstream, 128 in older files of the same type id

# --- llama.cpp as the second opinion --------------------------------------------------------------------------------


def llama_cpp_logits(path: Path, ids: torch.Tensor, n_vocab: int, betas: tuple[float, float] | None = None) -> np.ndarray:
    """`betas`: YaRN's beta_fast and beta_slow, which llama.cpp reads from the file for a few architectures only."""
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise RuntimeError("llama.cpp does not load the file")
    context = llama_cpp.llama_context_default_params()
    context.n_ctx, context.n_batch, context.n_ubatch, context.n_threads = 256, 64, 64, 1
    context.type_k = context.type_v = 0
    context.flash_attn_type = 0
    if betas:
        context.yarn_beta_fast, context.yarn_beta_slow = betas
    ctx = llama_cpp.llama_init_from_model(model, context)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids.tolist()):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    if llama_cpp.llama_decode(ctx, batch) != 0:
        raise RuntimeError("llama.cpp does not run the model")
    rows = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(ctx, i), (n_vocab,)).copy() for i in range(len(ids))]
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(ctx)
    llama_cpp.llama_model_free(model)
    return np.stack(rows)


# no vocabulary, but the number of its entries, which llama.cpp wants before it takes token ids
def without_vocabulary(config: dict, arch: str) -> dict:
    return {"tokenizer.ggml.model": "none", f"{arch}.vocab_size": config["vocab_size"]}


def nll(logits: np.ndarray, ids: torch.Tensor) -> float:
    logp = torch.log_softmax(torch.from_numpy(logits[:-1]).double(), -1)
    return float(-logp.gather(1, ids[1:].long()[:, None]).mean())


def report(name: str, folder: Path, reference: torch.Tensor, other, ids, note: str) -> None:
    size = c.folder_bytes(folder) / 1024
    if isinstance(other, str):
        print(f"| {name} | {size:.0f} | no: {other} | | |", flush=True)
        return
    ref = reference.numpy()
    diff, dn = np.abs(other - ref).max(), abs(nll(other, ids) - nll(ref, ids))
    same = (other.argmax(-1) == ref.argmax(-1)).mean()
    print(f"| {name} | {size:.0f} | {note} | {diff:.1e} | {dn:.1e}, top-1 {same:.0%} |", flush=True)
    if note == "f32 copy":
        # llama.cpp looks GELU up in a table of f16
        bound = 1e-2 if name.startswith("gemma") else 1e-3
        assert diff < bound, f"{name}: llama.cpp disagrees with transformers by {diff}"


# --- the files ------------------------------------------------------------------------------------------------------


def fresh(name: str) -> Path:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def rounded_state(name: str, config: dict, std=0.2, embed_std=0.6, head_std=0.3) -> dict:
    """Random weights that f16 holds exactly (as do norms: they are f32 in the file, and 1 + w must be exact)."""
    state = c.random_state(name, config, std, embed_std, head_std)
    return {k: (t * 512).round() / 512 if t.ndim == 1 else t.half().float() for k, t in state.items()}


def float_model(config: dict, state: dict):
    model = c.model_from(config)
    missing, unexpected = model.load_state_dict({k: t.float() for k, t in state.items()}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    if model.config.tie_word_embeddings:
        model.tie_weights()
    return model


def make_float(name: str, config: dict, type_id: int = g.F16, arch: str | None = None, more: dict | None = None, parts: int = 1, **stds) -> None:
    arch = arch or ARCH.get(config["model_type"], config["model_type"])
    state = rounded_state(name, config, **stds)
    if type_id == g.BF16:
        state = {k: t.bfloat16().float() if t.ndim == 2 else t for k, t in state.items()}
    ids = c.input_ids(name, config["vocab_size"])
    reference = c.reference_of(float_model(config, state), ids)
    values = values_for_gguf(state, config, arch)
    meta = metadata(config, arch, {g.F32: 0, g.F16: 1, g.BF16: 32}[type_id], more or {})
    folder = fresh(name)
    tensors = encode(values, lambda _: type_id)
    if parts == 1:
        g.write(folder / "model.gguf", meta, tensors)
    else:
        write_parts(folder, meta, tensors, parts)
    save_file(reference, folder / "reference.safetensors")
    with tempfile.TemporaryDirectory() as tmp:
        copy = Path(tmp) / "copy.gguf"
        g.write(copy, meta | without_vocabulary(config, arch), encode(values, lambda _: g.F32))
        rope = config.get("rope_parameters", {})
        betas = (rope["beta_fast"], rope["beta_slow"]) if "beta_fast" in rope else None
        other = llama_cpp_logits(copy, ids, config["vocab_size"], betas)
    report(name, folder, reference["logits"], other, ids, "f32 copy")


def write_parts(folder: Path, meta: dict, tensors: dict, parts: int) -> None:
    """A split set: the metadata is in the first part, each part says its number."""
    names = list(tensors)
    per_part = -(-len(names) // parts)
    for i in range(parts):
        part = {n: tensors[n] for n in names[i * per_part:(i + 1) * per_part]}
        split = {"split.no": g.U16(i), "split.count": g.U16(parts), "split.tensors.count": g.I32(len(names))}
        g.write(folder / f"model-{i + 1:05}-of-{parts:05}.gguf", (meta if i == 0 else {}) | split, part)


def make_ternary(name: str, config: dict, type_id: int, file_type: int, arch: str, activations: str, head: int = g.F16, more: dict | None = None) -> None:
    """`activations`: `int8` as the ternary models define them, or `float` for models trained without that step.

    For `int8` the reference file also holds `logits_float_activations`, to tell one behaviour from the other.
    """
    global GROUP
    state = rounded_state(name, config)
    for key in state:
        if key.endswith("_proj.weight"):
            codes, multiplier = c.ternarise(state[key])
            if type_id == g.Q8_0:  # what 127 steps of a block's f16 scale come to
                multiplier = 127 * float(np.float16(multiplier / 127))
            state[key] = codes * (multiplier if type_id == g.Q8_0 else float(np.float16(multiplier)))
    ids = c.input_ids(name, config["vocab_size"])
    floats = float_model(config, state)
    if activations == "int8":
        with tempfile.TemporaryDirectory() as tmp:
            quantised = {}
            for key, t in state.items():
                quantised[key] = t
                if key.endswith("_proj.weight"):
                    multiplier = t.abs().max()
                    quantised[key] = c.pack_quarters((t / multiplier).round())
                    quantised[key + "_scale"] = multiplier.reshape(1)
            save_file({k: t.contiguous() for k, t in quantised.items()}, f"{tmp}/model.safetensors", metadata={"format": "pt"})
            c.write_config(Path(tmp), config | {"dtype": "float32", "quantization_config": v.QUANT})
            reference = c.reference_of(c.load(Path(tmp)), ids)
        reference["logits_float_activations"] = c.logits_of(floats, ids).contiguous()
    else:
        reference = c.reference_of(floats, ids)
    values = values_for_gguf(state, config, arch)
    folder = fresh(name)
    matrix = lambda n: head if n in ("token_embd.weight", "output.weight") else type_id  # noqa: E731
    meta = metadata(config, arch, file_type, more or {})
    g.write(folder / "model.gguf", meta, encode(values, matrix))
    save_file(reference, folder / "reference.safetensors")
    if arch == "llama":  # the graph, without the int8 step, from an f32 copy
        truth = c.logits_of(floats, ids)
        with tempfile.TemporaryDirectory() as tmp:
            copy = Path(tmp) / "copy.gguf"
            g.write(copy, meta | without_vocabulary(config, arch), encode(values, lambda _: g.F32))
            report(name, folder, truth, llama_cpp_logits(copy, ids, config["vocab_size"]), ids, "f32 copy")
    else:
        report(name, folder, reference["logits"], "llama.cpp has no such graph", ids, "")


def make_masters(name: str, config: dict, arch: str) -> None:
    """Float masters of a ternary model: they become ternary when loaded, so that is the truth; llama.cpp sees the plain float graph."""
    state = rounded_state(name, config)
    ids = c.input_ids(name, config["vocab_size"])
    with tempfile.TemporaryDirectory() as tmp:
        save_file({k: t.contiguous() for k, t in state.items()}, f"{tmp}/model.safetensors", metadata={"format": "pt"})
        c.write_config(Path(tmp), config | {"dtype": "float32", "quantization_config": v.ONLINE})
        reference = c.reference_of(c.load(Path(tmp)), ids)
    plain = c.logits_of(float_model(config, state), ids)
    reference["logits_plain_float"] = plain.contiguous()
    values = values_for_gguf(state, config, arch)
    meta = metadata(config, arch, 1, {})
    folder = fresh(name)
    g.write(folder / "model.gguf", meta, encode(values, lambda _: g.F16))
    save_file(reference, folder / "reference.safetensors")
    with tempfile.TemporaryDirectory() as tmp:
        copy = Path(tmp) / "copy.gguf"
        g.write(copy, meta | without_vocabulary(config, arch), encode(values, lambda _: g.F32))
        report(name, folder, plain, llama_cpp_logits(copy, ids, config["vocab_size"]), ids, "f32 copy")


def make_blocks(name: str, config: dict, type_id: int, group: int, file_type: int) -> None:
    """Q1_0 and the Q2_0 kinds, end to end, embedding and head included; activations are float."""
    global GROUP
    GROUP = group
    state = rounded_state(name, config)
    for key, t in state.items():
        if t.ndim == 2:
            pack = (lambda w: g.q1_0(w)) if type_id == g.Q1_0 else (lambda w: g.q2_0(w, group))
            state[key] = torch.from_numpy(pack(t.numpy())[1])
            assert np.array_equal(pack(state[key].numpy())[1], state[key].numpy()) or type_id != g.Q1_0
    ids = c.input_ids(name, config["vocab_size"])
    original = rounded_state(name, config)
    reference = c.reference_of(float_model(config, state), ids)
    folder = fresh(name)
    arch = config["model_type"]
    meta = metadata(config, arch, file_type, {})
    g.write(folder / "model.gguf", meta, encode(values_for_gguf(original, config, arch), lambda _: type_id))
    save_file(reference, folder / "reference.safetensors")
    with tempfile.TemporaryDirectory() as tmp:
        copy = Path(tmp) / "copy.gguf"
        g.write(copy, meta | without_vocabulary(config, arch), encode(values_for_gguf(state, config, arch), lambda _: g.F32))
        report(name, folder, reference["logits"], llama_cpp_logits(copy, ids, config["vocab_size"]), ids, "f32 copy")
        try:
            g.write(copy, meta | without_vocabulary(config, arch), encode(values_for_gguf(original, config, arch), lambda _: type_id))
            other = llama_cpp_logits(copy, ids, config["vocab_size"])
        except RuntimeError as error:
            other = str(error)
        report(name + " (as stored)", folder, reference["logits"], other, ids, "stored blocks, int8 activations")


K_QUANT = v.cfg("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
                head_dim=64, tie_word_embeddings=True)
FTYPES = dict(q4_0=2, q4_1=3, q8_0=7, q5_0=8, q5_1=9, q2_k=10, q3_k_m=12, q4_k_m=15, q5_k_m=17, q6_k=18, tq1_0=36, tq2_0=37)


def make_quantised(kind: str) -> None:
    """One model through llama.cpp's own quantizer; the truth is transformers on what gguf-py dequantizes."""
    name, config = f"llama-{kind.replace('_', '-')}", K_QUANT
    state = rounded_state("llama-quantised", config, std=0.1)
    ids = c.input_ids("llama-quantised", config["vocab_size"])
    folder = fresh(name)
    with tempfile.TemporaryDirectory() as tmp:
        source, target = Path(tmp) / "f32.gguf", Path(tmp) / "quantised.gguf"
        meta = metadata(config, "llama", 0, {})
        values = values_for_gguf(state, config, "llama")
        if kind == "mxfp4":
            g.write(target, meta | without_vocabulary(config, "llama"), encode(values, lambda _: g.MXFP4))
        else:
            g.write(source, meta | without_vocabulary(config, "llama"), encode(values, lambda _: g.F32))
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.nthread = FTYPES[kind], 1
            assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params) == 0
        stored = {t.name: (t, gguf.quants.dequantize(t.data, t.tensor_type)) for t in gguf.GGUFReader(target).tensors}
        truth = {}
        for hf_name, t in state.items():
            value = np.array(stored[gguf_name(hf_name, "llama")][1], np.float32).reshape(t.shape)
            heads = heads_of(hf_name, config)
            truth[hf_name] = torch.from_numpy(unpermute(value, heads).copy() if heads else value)
        reference = c.reference_of(float_model(config, truth), ids)
        tensors = {n: (tuple(int(d) for d in reversed(t.shape)), int(t.tensor_type), bytes(t.data.tobytes())) for n, (t, _) in stored.items()}
        g.write(folder / "model.gguf", meta | {"general.file_type": FTYPES.get(kind, 38)}, tensors)
        save_file(reference, folder / "reference.safetensors")
        types = sorted({gguf.GGMLQuantizationType(t).name for _, t, _ in tensors.values()} - {"F32"})
        other = llama_cpp_logits(target, ids, config["vocab_size"])
        copy = Path(tmp) / "copy.gguf"
        g.write(copy, meta | without_vocabulary(config, "llama"), encode(values_for_gguf(truth, config, "llama"), lambda _: g.F32))
        exact = llama_cpp_logits(copy, ids, config["vocab_size"])
    report(name, folder, reference["logits"], exact, ids, "f32 copy")
    report(f"{name} ({', '.join(types)})", folder, reference["logits"], other, ids, "stored blocks, int8 activations")


T = v.cfg("llama", hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=64)
BIT = v.cfg("bitnet", hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_act="relu2",
            tie_word_embeddings=True, **v.rope("default", 500000.0))
Q3 = v.cfg("qwen3", hidden_size=128, intermediate_size=256, head_dim=32, tie_word_embeddings=True, **v.rope("yarn", 1e6, **v.YARN), max_position_embeddings=128)
G3 = v.GEMMA3 | dict(query_pre_attn_scalar=12)
PHI_LONG = dict(**v.rope("longrope", **v.LONG), max_position_embeddings=96, original_max_position_embeddings=24)

CASES = {
    "llama": lambda n: make_float(n, v.cfg("llama", attention_bias=True, rms_norm_eps=1e-5)),
    "llama-f32-wide-head": lambda n: make_float(n, v.one_layer("llama", head_dim=20, num_key_value_heads=1), g.F32),
    "llama-bf16": lambda n: make_float(n, v.one_layer("llama"), g.BF16),
    "llama-rope-llama3": lambda n: make_float(n, v.one_layer("llama", **v.rope("llama3", 500.0, **v.LLAMA3), max_position_embeddings=96)),
    "llama-rope-linear": lambda n: make_float(n, v.one_layer("llama", **v.rope("linear", factor=2.5))),
    "llama-rope-yarn": lambda n: make_float(n, v.one_layer("llama", **v.rope("yarn", **v.YARN), max_position_embeddings=128)),
    "llama-rope-yarn-tuned": lambda n: make_float(n, v.one_layer("llama", **v.rope("yarn", 5000.0, **v.YARN, beta_fast=1.2, beta_slow=0.1), max_position_embeddings=128)),
    "llama-split": lambda n: make_float(n, v.cfg("llama"), parts=3),
    "mistral": lambda n: make_float(n, v.cfg("mistral", sliding_window=None, head_dim=24, num_key_value_heads=1)),
    "qwen2": lambda n: make_float(n, v.cfg("qwen2")),
    "qwen3": lambda n: make_float(n, v.cfg("qwen3", head_dim=24)),
    "qwen3-yarn": lambda n: make_float(n, v.cfg("qwen3", tie_word_embeddings=True, **v.rope("yarn", 1e6, **v.YARN), max_position_embeddings=128)),
    "gemma2": lambda n: make_float(n, v.GEMMA2 | dict(query_pre_attn_scalar=16), embed_std=0.15),
    "gemma3": lambda n: make_float(n, G3, embed_std=0.15),
    "gemma3-local-base": lambda n: make_float(n, G3 | dict(rope_parameters=v.G3_ROPE | {"sliding_attention": {"rope_type": "default", "rope_theta": 3000.0}}), embed_std=0.15),
    "phi3": lambda n: make_float(n, v.cfg("phi3")),
    "phi3-partial-rotary": lambda n: make_float(n, v.one_layer("phi3", rope_parameters=v.PARTIAL)),
    "phi3-longrope-long": lambda n: make_float(n, v.one_layer("phi3", **PHI_LONG)),
    "phi3-longrope-short": lambda n: make_float(n, v.one_layer("phi3", **PHI_LONG | dict(max_position_embeddings=8192, original_max_position_embeddings=4096))),
    "smollm3": lambda n: make_float(n, v.SMOL | v.rope("default", 2e6)),
    "bitnet-masters-f16": lambda n: make_masters(n, v.BITNET | dict(hidden_act="silu", tie_word_embeddings=True, num_hidden_layers=1), "bitnet"),
    "bitnet-b1.58-i2-s": lambda n: make_ternary(n, BIT, g.I2_S, 40, "bitnet-b1.58", "int8"),
    "bitnet-b1.58-i2-s-k128": lambda n: make_ternary(n, BIT | dict(hidden_size=128, intermediate_size=384, num_key_value_heads=1), g.I2_S, 40, "bitnet-b1.58", "int8"),
    "bitnet-25-i2-s": lambda n: make_ternary(n, BIT | dict(num_hidden_layers=1), g.I2_S, 40, "bitnet-25", "int8"),
    "bitnet-silu-i2-s": lambda n: make_ternary(n, BIT | dict(num_hidden_layers=1, hidden_act="silu"), g.I2_S, 40, "bitnet", "int8"),
    "bitnet-b1.58-tq2-0": lambda n: make_ternary(n, BIT | dict(num_hidden_layers=1), g.TQ2_0, 37, "bitnet-b1.58", "int8"),
    "bitnet-b1.58-tq1-0": lambda n: make_ternary(n, BIT | dict(num_hidden_layers=1), g.TQ1_0, 36, "bitnet-b1.58", "int8"),
    "bitnet-b1.58-f16": lambda n: make_ternary(n, BIT | dict(num_hidden_layers=1, hidden_size=128, intermediate_size=128), g.F16, 1, "bitnet-b1.58", "int8"),
    "bitnet-b1.58-q8-0": lambda n: make_ternary(n, BIT | dict(num_hidden_layers=1, hidden_size=128, intermediate_size=128), g.Q8_0, 7, "bitnet-b1.58", "int8"),
    "falcon-e-i2-s": lambda n: make_ternary(n, T | dict(num_hidden_layers=1), g.I2_S, 40, "llama", "int8"),
    "trilm-tq2-0": lambda n: make_ternary(n, T | dict(num_hidden_layers=1), g.TQ2_0, 37, "llama", "float"),
    "trilm-tq1-0": lambda n: make_ternary(n, T | dict(num_hidden_layers=1), g.TQ1_0, 36, "llama", "float"),
    "qwen3-q1-0": lambda n: make_blocks(n, Q3, g.Q1_0, 128, 40),
    "qwen3-q2-0-g64": lambda n: make_blocks(n, Q3, g.Q2_0, 64, 41),
    "qwen3-q2-0-g128": lambda n: make_blocks(n, Q3, g.Q2_0, 128, 41),
    "qwen3-pq2-0": lambda n: make_blocks(n, Q3, g.PQ2_0, 128, 141),
} | {f"llama-{k.replace('_', '-')}": lambda _, k=k: make_quantised(k) for k in [*list(FTYPES)[:10], "mxfp4"]}


def main() -> None:
    llama_cpp.llama_log_set(QUIET, None)
    llama_cpp.llama_backend_init()
    print("| file | KiB | llama.cpp | max difference of logits | difference of mean NLL |\n|---|---|---|---|---|")
    for name in sys.argv[1:] or CASES:
        CASES[name](name)
    total = sum(c.folder_bytes(HERE / n) for n in CASES if (HERE / n).exists())
    print(f"\nthe folder holds {total / 1e6:.1f} MB")


@llama_cpp.llama_log_callback
def QUIET(_level, _text, _data):
    pass


if __name__ == "__main__":
    main()
