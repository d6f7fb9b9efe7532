#!/usr/bin/env python3
"""Makes tiny random models of every shape the families allow, each with reference logits by transformers.

    make.py [NAME...]

Every variant names the change that turns its feature off; the run fails if that change leaves the logits alone,
so a reference that does not exercise its feature cannot be written.
"""
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import common as c

HERE = Path(__file__).resolve().parent

# --- the families' smallest sensible shapes -------------------------------------------------------------------------

BASE = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0, vocab_size=136, hidden_size=48, intermediate_size=40,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
            tie_word_embeddings=False, dtype="bfloat16")
ARCHITECTURE = dict(llama="LlamaForCausalLM", mistral="MistralForCausalLM", qwen2="Qwen2ForCausalLM",
                    qwen3="Qwen3ForCausalLM", gemma2="Gemma2ForCausalLM", gemma3_text="Gemma3ForCausalLM",
                    phi3="Phi3ForCausalLM", smollm3="SmolLM3ForCausalLM", bitnet="BitNetForCausalLM")


def cfg(model_type: str, **changes) -> dict:
    out = dict(architectures=[ARCHITECTURE[model_type]], model_type=model_type, **BASE)
    if model_type in ("qwen3", "gemma2", "gemma3_text"):
        out["head_dim"] = 12
    return out | changes


def v4(config: dict) -> dict:
    """The same model in the spelling of transformers 4: `torch_dtype`, `rope_theta`, `rope_scaling` with `type`."""
    out = dict(config)
    out["torch_dtype"] = out.pop("dtype")
    out["transformers_version"] = "4.44.0"
    rope = dict(out.pop("rope_parameters", {}))
    out["rope_theta"] = rope.pop("rope_theta", 10000.0)
    if "partial_rotary_factor" in rope:
        out["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type", "default")
    out["rope_scaling"] = {"type": kind, **rope} if kind != "default" else None
    return out


def rope(kind: str, theta: float = 10000.0, **more) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


DEFAULT_ROPE = rope("default")["rope_parameters"]

def one_layer(model_type: str, **changes) -> dict:
    return cfg(model_type, num_hidden_layers=1, tie_word_embeddings=True) | changes


# --- the variants ---------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict] = {}


def variant(name: str, config: dict, off: dict | str | None, **options) -> None:
    """`off`: config values without the feature, or `zero:PART` to zero the tensors whose name has PART in it.

    Options: std, embed_std, head_std; store (dtype, or a list of dtypes by turns); quant; shard (bytes); wrap, rename, relabel.
    """
    VARIANTS[name] = dict(config=config, off=off, **options)


# llama: shapes
variant("llama-bias", cfg("llama", num_hidden_layers=1, hidden_size=72, num_attention_heads=3, num_key_value_heads=3, head_dim=24,
        intermediate_size=172, attention_bias=True, mlp_bias=True), "zero:bias")
variant("llama-mqa-wide-head", one_layer("llama", num_attention_heads=4, num_key_value_heads=1, head_dim=20), None)
variant("llama-narrow-head-tied", one_layer("llama", hidden_size=50, num_attention_heads=5, num_key_value_heads=5, head_dim=10,
        intermediate_size=61, tie_word_embeddings=True, vocab_size=151), None)
variant("llama-implicit", {k: v for k, v in v4(one_layer("llama")).items()
        if k not in ("num_key_value_heads", "rope_scaling", "rope_theta", "tie_word_embeddings", "max_position_embeddings")},
        {"rms_norm_eps": 1e-2})
variant("llama-eps", one_layer("llama", rms_norm_eps=0.05), {"rms_norm_eps": 1e-6}, embed_std=0.2)
variant("llama-gelu", one_layer("llama", hidden_act="gelu"), {"hidden_act": "silu"})
variant("llama-theta", one_layer("llama", **rope("default", 500.0)), {"rope_parameters": DEFAULT_ROPE})

# llama: rope scaling, on one layer with a tied head
OFF_ROPE = {"rope_parameters": DEFAULT_ROPE}
OFF_ROPE_V4 = {"rope_scaling": None}
YARN = dict(factor=4.0, original_max_position_embeddings=32)
LLAMA3 = dict(factor=4.0, low_freq_factor=1.5, high_freq_factor=3.0, original_max_position_embeddings=24)
LINEAR = one_layer("llama", **rope("linear", factor=2.5))
variant("llama-rope-linear", LINEAR, OFF_ROPE)
variant("llama-rope-linear-v4", v4(LINEAR), OFF_ROPE_V4)
variant("llama-rope-dynamic-short", one_layer("llama", **rope("dynamic", factor=4.0)), None)
DYNAMIC = one_layer("llama", **rope("dynamic", factor=4.0), max_position_embeddings=24)
variant("llama-rope-dynamic-long", DYNAMIC, OFF_ROPE)
variant("llama-rope-dynamic-long-v4", v4(DYNAMIC), OFF_ROPE_V4)
variant("llama-rope-yarn", one_layer("llama", **rope("yarn", **YARN), max_position_embeddings=128), OFF_ROPE)
variant("llama-rope-yarn-v4", v4(one_layer("llama", **rope("yarn", **YARN), max_position_embeddings=128)), OFF_ROPE_V4)
variant("llama-rope-yarn-tuned", one_layer("llama", **rope("yarn", 5000.0, **YARN, attention_factor=0.75, beta_fast=1.2,
        beta_slow=0.1), max_position_embeddings=128),
        rope("yarn", 5000.0, **YARN, attention_factor=0.75))
variant("llama-rope-yarn-untruncated", one_layer("llama", **rope("yarn", **YARN, truncate=False), max_position_embeddings=128),
        rope("yarn", **YARN))
variant("llama-rope-yarn-mscale", one_layer("llama", **rope("yarn", **YARN, mscale=1.5, mscale_all_dim=0.5),
        max_position_embeddings=128), rope("yarn", **YARN))
variant("llama-rope-yarn-no-original", one_layer("llama", **rope("yarn", factor=4.0), max_position_embeddings=40), OFF_ROPE)
variant("llama-rope-yarn-factor-disagrees", one_layer("llama", **rope("yarn", factor=3.0, original_max_position_embeddings=32),
        max_position_embeddings=256), rope("yarn", factor=8.0, original_max_position_embeddings=32))
variant("llama-rope-original-on-top", one_layer("llama", **rope("yarn", **YARN), original_max_position_embeddings=16,
        max_position_embeddings=128), {"original_max_position_embeddings": 32})
variant("llama-rope-llama3", one_layer("llama", **rope("llama3", 500.0, **LLAMA3), max_position_embeddings=96), rope("default", 500.0))
variant("llama-rope-llama3-v4", v4(one_layer("llama", **rope("llama3", 500.0, **LLAMA3), max_position_embeddings=96)), OFF_ROPE_V4)
variant("llama-rope-longrope", one_layer("llama", **rope("longrope", factor=4.0, original_max_position_embeddings=24,
        short_factor=[1.0] * 6, long_factor=[1.0, 1.2, 1.5, 2.0, 3.0, 4.0]), max_position_embeddings=96), OFF_ROPE)

# mistral
variant("mistral-no-window", one_layer("mistral", sliding_window=None, num_key_value_heads=4), None)
variant("mistral-window-7", one_layer("mistral", sliding_window=7, head_dim=24), {"sliding_window": None})
variant("mistral-window-v4", v4(one_layer("mistral", sliding_window=11, num_key_value_heads=1, **rope("default", 1000.0))),
        {"sliding_window": None})

# qwen2
QWEN2 = cfg("qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=1, num_hidden_layers=3, tie_word_embeddings=True)
variant("qwen2-window-tied", QWEN2, {"use_sliding_window": False})
variant("qwen2-window-v4", v4(QWEN2), {"use_sliding_window": False})
variant("qwen2-window-off", cfg("qwen2", use_sliding_window=False, sliding_window=5, max_window_layers=0,
        num_attention_heads=3, num_key_value_heads=1), {"use_sliding_window": True})
variant("qwen2-layer-types", cfg("qwen2", use_sliding_window=True, sliding_window=6, max_window_layers=2,
        layer_types=["sliding_attention", "full_attention"]), {"layer_types": ["full_attention", "sliding_attention"]})
variant("qwen2-bias", one_layer("qwen2", num_key_value_heads=1, intermediate_size=100), "zero:bias")

# qwen3
variant("qwen3-yarn-tied", one_layer("qwen3", head_dim=24, **rope("yarn", 1e6, **YARN), max_position_embeddings=128,
        tie_word_embeddings=True), {"rope_parameters": DEFAULT_ROPE | {"rope_theta": 1e6}})
variant("qwen3-yarn-v4", v4(one_layer("qwen3", **rope("yarn", 1e6, **YARN), max_position_embeddings=128)), OFF_ROPE_V4)
variant("qwen3-bias", one_layer("qwen3", attention_bias=True, num_key_value_heads=4), "zero:bias")
variant("qwen3-window", cfg("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1, head_dim=24),
        {"use_sliding_window": False})

# gemma2
GEMMA2 = cfg("gemma2", attn_logit_softcapping=2.0, final_logit_softcapping=3.0, query_pre_attn_scalar=5, sliding_window=6,
             head_dim=16, num_hidden_layers=3, tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh")
variant("gemma2-caps", GEMMA2, {"attn_logit_softcapping": None}, embed_std=0.15)
variant("gemma2-window-v4", {k: v for k, v in v4(GEMMA2 | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}).items()
        if k != "tie_word_embeddings"}, {"sliding_window": 100}, embed_std=0.15)
variant("gemma2-no-caps-bias", GEMMA2 | dict(attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=True,
        num_key_value_heads=1, num_hidden_layers=2, tie_word_embeddings=False), "zero:bias", embed_std=0.15, head_std=0.15)

# gemma3
G3_ROPE = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
           "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
GEMMA3 = cfg("gemma3_text", num_hidden_layers=7, sliding_window=8, query_pre_attn_scalar=7, num_key_value_heads=1,
             hidden_size=48, num_attention_heads=3, intermediate_size=20, rope_parameters=G3_ROPE, tie_word_embeddings=True,
             hidden_activation="gelu_pytorch_tanh")
GEMMA3_V4 = {k: v for k, v in GEMMA3.items() if k not in ("dtype", "rope_parameters")} | dict(
    torch_dtype="bfloat16", rope_theta=1e6, rope_local_base_freq=3000.0, rope_scaling={"rope_type": "linear", "factor": 8.0},
    sliding_window_pattern=3, final_logit_softcapping=4.0)
variant("gemma3-pattern", GEMMA3, {"rope_parameters": G3_ROPE | {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
        embed_std=0.15)
variant("gemma3-pattern-v4", GEMMA3_V4, {"sliding_window_pattern": 6}, embed_std=0.15)
variant("gemma3-layer-types", GEMMA3 | dict(num_hidden_layers=3, num_key_value_heads=3, query_pre_attn_scalar=16,
        layer_types=["full_attention", "sliding_attention", "full_attention"], attention_bias=True),
        {"layer_types": ["sliding_attention"] * 3}, embed_std=0.15)
VISION = dict(model_type="siglip_vision_model", hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
              image_size=28, patch_size=14)


def multimodal(text: dict) -> dict:
    text = {k: v for k, v in text.items() if k not in ("architectures", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")}
    return dict(architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3", text_config=text, vision_config=VISION,
                mm_tokens_per_image=4, boi_token_index=133, eoi_token_index=134, image_token_index=135, initializer_range=0.02,
                bos_token_id=2, eos_token_id=[1, 106], torch_dtype="bfloat16")


variant("gemma3-multimodal-v4", GEMMA3_V4 | {"final_logit_softcapping": None}, {"sliding_window_pattern": 6}, embed_std=0.15,
        wrap=multimodal, rename=("model.", "language_model.model."))
variant("gemma3-multimodal", GEMMA3 | {"num_hidden_layers": 6, "num_key_value_heads": 3}, {"sliding_window": 100}, embed_std=0.15,
        wrap=multimodal, rename=("model.", "model.language_model."))


def multimodal_bare(text: dict) -> dict:
    """As the larger Gemma 3 checkpoints have it: what transformers fills in is left out, the local rope base too."""
    kept = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "rope_scaling", "sliding_window")
    return multimodal({k: text[k] for k in kept})


GEMMA3_BARE = dict(GEMMA3_V4) | dict(hidden_size=8, intermediate_size=8, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
    head_dim=256, query_pre_attn_scalar=256, sliding_window_pattern=6, rope_theta=1000000.0, rope_local_base_freq=10000.0,
    final_logit_softcapping=None)
variant("gemma3-multimodal-bare-v4", GEMMA3_BARE, {"rope_local_base_freq": 80000.0}, embed_std=0.3, std=0.4,
        wrap=multimodal_bare, rename=("model.", "language_model.model."))

# phi3
LONG = dict(short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.6], long_factor=[1.0, 1.5, 2.0, 3.0, 5.0, 8.0])
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
variant("phi3-partial-rotary", cfg("phi3", rope_parameters=PARTIAL), {"rope_parameters": PARTIAL | {"partial_rotary_factor": 1.0}})
variant("phi3-partial-rotary-v4", v4(one_layer("phi3", rope_parameters=PARTIAL | {"partial_rotary_factor": 0.75})),
        {"partial_rotary_factor": 1.0})
variant("phi3-window", one_layer("phi3", sliding_window=9, num_key_value_heads=1), {"sliding_window": None})
variant("phi3-longrope-short", one_layer("phi3", **rope("longrope", **LONG), original_max_position_embeddings=64), OFF_ROPE)
variant("phi3-longrope-long", one_layer("phi3", **rope("longrope", **LONG), original_max_position_embeddings=24, max_position_embeddings=96,
        tie_word_embeddings=True), OFF_ROPE)
variant("phi3-longrope-long-v4", v4(one_layer("phi3", **rope("longrope", **LONG), original_max_position_embeddings=24,
        max_position_embeddings=96)), OFF_ROPE_V4)
variant("phi3-longrope-su-partial", v4(one_layer("phi3", **rope("su", short_factor=LONG["short_factor"][:3], long_factor=LONG["long_factor"][3:],
        partial_rotary_factor=0.5, original_max_position_embeddings=24), original_max_position_embeddings=24,
        max_position_embeddings=96)), OFF_ROPE_V4)

# smollm3
SMOL = cfg("smollm3", num_hidden_layers=8, num_attention_heads=3, num_key_value_heads=1, intermediate_size=20,
           tie_word_embeddings=True)
variant("smollm3-default-interval", SMOL, {"no_rope_layers": [1] * 8}, std=0.12)
variant("smollm3-list-v4", v4(SMOL | dict(no_rope_layers=[1, 0, 1, 0], num_hidden_layers=4, **rope("default", 3000.0))),
        {"no_rope_layers": [1] * 4}, std=0.15)
variant("smollm3-interval-2-window", SMOL | dict(num_hidden_layers=4, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=7,
        attention_bias=True, mlp_bias=True, tie_word_embeddings=False), {"use_sliding_window": False})

# ternary
QUANT = dict(quant_method="bitnet", linear_class="autobitlinear", quantization_mode="offline", modules_to_not_convert=None)
DIVIDE = QUANT | dict(linear_class="bitlinear")
ONLINE = QUANT | dict(quantization_mode="online")
BITNET = cfg("bitnet", hidden_size=96, intermediate_size=160, num_attention_heads=6, num_key_value_heads=2, hidden_act="relu2",
             **rope("default", 500000.0))
variant("bitnet-packed-odd", BITNET | dict(tie_word_embeddings=True), {"hidden_act": "silu"}, quant=QUANT)
variant("bitnet-packed-silu-untied", BITNET | dict(hidden_act="silu", num_key_value_heads=1), {"hidden_act": "relu2"}, quant=QUANT)
variant("bitnet-online", BITNET | dict(tie_word_embeddings=True, num_key_value_heads=6, hidden_size=48, intermediate_size=80), {"hidden_act": "silu"}, quant=ONLINE, std=0.6)


def first_bitnet(config: dict) -> dict:
    """As the community's first BitNet checkpoints have it: a llama by name, told apart by the bits of its weights."""
    return config | dict(architectures=["BitnetForCausalLM"], model_type="llama", weight_bits=1, input_bits=8)


variant("bitnet-1bitllm", BITNET | dict(hidden_act="silu", tie_word_embeddings=True, hidden_size=48, intermediate_size=80), {"hidden_act": "relu2"},
        quant=ONLINE, std=0.6, wrap=first_bitnet, relabel={"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"})
variant("bitnet-bitlinear-class", {k: v for k, v in BITNET.items() if k != "hidden_act"} | dict(num_hidden_layers=1), {"hidden_act": "silu"},
        quant={k: v for k, v in DIVIDE.items() if k not in ("linear_class", "quantization_mode", "modules_to_not_convert")})
variant("llama-bitlinear-norm", cfg("llama", attention_bias=False), None, quant=DIVIDE | dict(use_rms_norm=True, rms_norm_eps=1e-3))
variant("llama-autobitlinear-norm", cfg("llama", hidden_size=60, num_attention_heads=5, num_key_value_heads=5), None,
        quant=QUANT | dict(use_rms_norm=True))
variant("llama-autobitlinear-online", one_layer("llama", num_key_value_heads=1), None, quant=ONLINE)
variant("llama-bitlinear-bias", cfg("llama", attention_bias=True, mlp_bias=True, hidden_size=72, num_attention_heads=3, num_key_value_heads=1,
        intermediate_size=52), "zero:bias", quant=DIVIDE)
variant("qwen3-bitlinear", cfg("qwen3", head_dim=24, tie_word_embeddings=True), None, quant=DIVIDE)
variant("llama-bitlinear-skips", cfg("llama", num_hidden_layers=3), None,
        quant=DIVIDE | dict(modules_to_not_convert=["lm_head", "model.layers.0.mlp", "v_proj", r"model.layers.\d.self_attn.o_proj"]))
variant("llama-online-skips", cfg("llama", attention_bias=True), None,
        quant=ONLINE | dict(modules_to_not_convert=["lm_head", "model.layers.0.mlp", "v_proj", r"model.layers.\d.self_attn.o_proj"]))
variant("llama-online-ternary-head", one_layer("llama", tie_word_embeddings=False), None, quant=ONLINE | dict(modules_to_not_convert=["v_proj"]))
variant("llama-online-skips-nothing", one_layer("llama", tie_word_embeddings=False), None, quant=ONLINE | dict(modules_to_not_convert=[]))
variant("llama-bitlinear-ternary-head", cfg("llama"), None, quant=DIVIDE | dict(modules_to_not_convert=["model.layers.1"]))

# storage
variant("llama-sharded", cfg("llama"), None, shard=40_000)
variant("llama-stored-f32", cfg("llama", num_hidden_layers=1, dtype="float32"), None, store=torch.float32, seed="llama-stored")
variant("llama-stored-f16", cfg("llama", num_hidden_layers=1, dtype="float16"), None, store=torch.float16, seed="llama-stored")
variant("llama-stored-bf16", cfg("llama", num_hidden_layers=1), None, store=torch.bfloat16, seed="llama-stored")
variant("llama-stored-mixed", cfg("llama", num_hidden_layers=1), None, seed="llama-stored",
        store=[torch.float32, torch.float16, torch.bfloat16])

# --- making them ----------------------------------------------------------------------------------------------------


def is_converted(quant: dict, tied: bool):
    """Which linears transformers makes ternary, by the rule of its `should_convert_module`."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    patterns = quant.get("modules_to_not_convert")
    if patterns is None:
        patterns = ["lm_head"] + (["model.embed_tokens"] if tied else [])
    return lambda name: "embed_tokens" not in name and should_convert_module(name, patterns)


def stored(spec: dict, state: dict) -> dict[str, torch.Tensor]:
    """The tensors as they lie in the file."""
    quant = spec.get("quant")
    if quant:
        ternary = is_converted(quant, spec["config"]["tie_word_embeddings"])
        if quant.get("use_rms_norm"):
            rng = torch.Generator().manual_seed(7)
            for key in [k for k in state if k.endswith("_proj.weight")]:
                width = state[key].shape[1]
                state[key.replace(".weight", ".rms_norm.weight")] = 1 + 0.3 * torch.randn(width, generator=rng)
        if quant.get("quantization_mode", "offline") == "offline":
            return c.packed_state(state, ternary, divides=quant.get("linear_class") != "autobitlinear")
    dtypes = spec.get("store", torch.bfloat16)
    dtypes = dtypes if isinstance(dtypes, list) else [dtypes]
    return {k: v.to(dtypes[i % len(dtypes)]).contiguous() for i, (k, v) in enumerate(state.items())}


def save_shards(folder: Path, tensors: dict, limit: int) -> None:
    shards, size = [{}], 0
    for key, value in tensors.items():
        n_bytes = value.numel() * value.element_size()
        if shards[-1] and size + n_bytes > limit:
            shards.append({})
            size = 0
        shards[-1][key] = value
        size += n_bytes
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards):
        save_file(shard, folder / name, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(v.numel() * v.element_size() for v in tensors.values())},
             "weight_map": {k: name for name, shard in zip(names, shards) for k in shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def make(name: str, spec: dict) -> None:
    config, off = spec["config"], spec["off"]
    state = c.random_state(spec.get("seed", name), config, spec.get("std", 0.2), spec.get("embed_std", 0.6), spec.get("head_std", 0.3))
    tensors = stored(spec, state)
    full = config | ({"quantization_config": spec["quant"]} if "quant" in spec else {})

    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()

    def write(config: dict, tensors: dict) -> None:
        c.write_config(folder, config)
        if "shard" in spec:
            save_shards(folder, tensors, spec["shard"])
        else:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    effect = None
    ids = c.input_ids(name if "seed" not in spec else spec["seed"], config["vocab_size"])
    if off is not None:  # the same weights with the feature off, before the real files take their place
        if isinstance(off, str):
            part = off.removeprefix("zero:")
            write(full, {k: torch.zeros_like(v) if part in k else v for k, v in tensors.items()})
        else:
            write(full | off, tensors)
        without = c.logits_of(c.load(folder), ids)
    write(full, tensors)
    model = c.load(folder)
    reference = c.reference_of(model, ids)
    if off is not None:
        effect = (reference["logits"] - without).abs().max().item()
        assert effect > 0.05, f"{name}: switching the feature off changes the logits by {effect} only"
    assert reference["logits"].isfinite().all()

    if "relabel" in spec:  # the same model under the names of another exporter
        def relabelled(key: str) -> str:
            for old, new in spec["relabel"].items():
                key = key.replace(old, new)
            return key

        write(spec["wrap"](config), {relabelled(k): v for k, v in tensors.items()})
    elif "wrap" in spec:  # the text model is the truth; the files look like a multimodal checkpoint
        old, new = spec["rename"]
        text = {new + k.removeprefix(old) if k.startswith(old) else k: v for k, v in tensors.items()}
        rng = torch.Generator().manual_seed(3)
        vision = "vision_tower.vision_model." if new.startswith("language") else "model.vision_tower."
        projector = "multi_modal_projector." if new.startswith("language") else "model.multi_modal_projector."
        for key, shape in ((vision + "embeddings.patch_embedding.weight", (16, 3, 14, 14)),
                           (vision + "embeddings.position_embedding.weight", (4, 16)),
                           (vision + "encoder.layers.0.self_attn.q_proj.weight", (16, 16)),
                           (vision + "encoder.layers.0.self_attn.q_proj.bias", (16,)),
                           (vision + "post_layernorm.weight", (16,)),
                           (projector + "mm_input_projection_weight", (16, config["hidden_size"])),
                           (projector + "mm_soft_emb_norm.weight", (16,))):
            text[key] = torch.randn(shape, generator=rng).to(torch.bfloat16)
        write(spec["wrap"](config), text)

    save_file(reference, folder / "reference.safetensors")
    logits = reference["logits"]
    print(f"{name:34} {c.folder_bytes(folder) / 1024:6.0f} KiB  logits std {logits.std():5.2f}  "
          + (f"feature off: max change {effect:8.3f}" if effect is not None else ""), flush=True)


def main() -> None:
    chosen = sys.argv[1:] or list(VARIANTS)
    for name in chosen:
        make(name, VARIANTS[name])
    total = sum(c.folder_bytes(HERE / n) for n in VARIANTS if (HERE / n).exists())
    print(f"{len(chosen)} models made; the folder holds {total / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
