"""Low-rank adapters of the tiny reference models, saved by PEFT, and the logits of the models with them.

    PYTHONPATH=<peft> python make.py

Needs torch, transformers 5.23, accelerate, peft 0.21, gguf, safetensors and numpy.
The logits of float models are those of the merged model, `W + Σ scale · scaling · B A`, in f64, computed here without PEFT;
PEFT's own, with the adapter beside the weights, must agree. Those of the ternary model can't be merged:
there the adapter's part is added to the output of each layer by a hook.
"""
import json
import math
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "reference-variants"))

import numpy as np
import torch
from common import load, model_from, seed_of
from gguf import GGUFReader
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

N_TOKENS = 16
ATTENTION, FEED_FORWARD = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]

# Of each base: its folder, and two adapters as PEFT's settings and the type they are saved in.
ALL = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION + FEED_FORWARD}
STABILISED = {
    "r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"],
    "rank_pattern": {"down_proj": 6, "layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"o_proj": 2, "layers.1.self_attn.q_proj": 7},
}
FUSED = {"r": 5, "lora_alpha": 6, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}
FEW = {"r": 2, "lora_alpha": 3, "target_modules": ["down_proj", "qkv_proj"], "layers_to_transform": [1]}
BASES = {
    "llama": ("reference-logits/llama", {"all": (ALL, torch.float32), "stabilised": (STABILISED, torch.bfloat16)}),
    "gemma3": ("reference-logits/gemma3", {"all": (ALL, torch.float16), "stabilised": (STABILISED, torch.float32)}),
    "phi3": ("reference-logits/phi3", {"fused": (FUSED, torch.bfloat16), "few": (FEW, torch.float32)}),
    "bitnet": ("reference-logits/bitnet-packed", {"all": (ALL, torch.float32), "stabilised": (STABILISED, torch.bfloat16)}),
    "llama-gguf": ("reference-gguf/llama", {"all": (ALL, torch.bfloat16), "stabilised": (STABILISED, torch.float32)}),
}
# How strongly the two are applied together.
TOGETHER = (0.5, -1.5)


def model_from_gguf(path: Path):
    """A llama model from a GGUF file, its rows of queries and keys put back into Hugging Face's order."""
    reader = GGUFReader(path)
    value = lambda key: reader.fields[f"llama.{key}"].contents()
    tensors = {t.name: torch.tensor(np.asarray(t.data, dtype=np.float32)) for t in reader.tensors}
    config = {
        "model_type": "llama", "hidden_size": value("embedding_length"), "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": value("block_count"), "num_attention_heads": value("attention.head_count"),
        "num_key_value_heads": value("attention.head_count_kv"), "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"), "max_position_embeddings": value("context_length"), "vocab_size": value("vocab_size"),
        "attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    names = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    }
    state = {}
    for name, tensor in tensors.items():
        *block, part, kind = name.split(".")
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(part)
        if heads:
            rows = tensor.shape[0]
            tensor = tensor.reshape(heads, rows // heads // 2, 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        prefix = f"model.layers.{block[1]}." if block else ""
        state[f"{prefix}{names[part]}.{kind}"] = tensor
    model = model_from(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all("inv_freq" in name for name in missing), (missing, unexpected)
    return model


def open_base(folder: Path):
    gguf = folder / "model.gguf"
    return model_from_gguf(gguf) if gguf.exists() else load(folder)


def make_adapter(folder: Path, base: Path, settings: dict, dtype) -> None:
    model = get_peft_model(open_base(base), LoraConfig(task_type="CAUSAL_LM", **settings))
    rng = torch.Generator().manual_seed(seed_of(str(folder.relative_to(HERE))))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                std = 0.3 if "lora_B" in name else 1 / math.sqrt(parameter.shape[1])
                parameter.data = (torch.randn(parameter.shape, generator=rng) * std).to(dtype)
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = f"reference/{base.name}"
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def changes(folder: Path) -> dict[str, torch.Tensor]:
    """`scaling · B A` of each module, in f64, from the files alone."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    out = {}
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        b = tensors[name.replace("lora_A", "lora_B")].double()
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        rank, alpha = a.shape[0], config["lora_alpha"]
        for pattern, value in config["alpha_pattern"].items():
            if module == pattern or module.endswith("." + pattern):
                alpha = value
                break
        scaling = alpha / math.sqrt(rank) if config["use_rslora"] else alpha / rank
        out[module] = scaling * (b @ a.double())
    return out


@torch.no_grad()
def logits_of(model, ids) -> torch.Tensor:
    return model(input_ids=ids.long()[None], use_cache=False).logits[0]


def merged(base: Path, adapters: list[tuple[Path, float]], ids) -> torch.Tensor:
    model = open_base(base).double()
    for folder, scale in adapters:
        for module, change in changes(folder).items():
            weight = model.get_submodule(module).weight
            weight.data += scale * change
    return logits_of(model, ids)


def beside(base: Path, adapters: list[tuple[Path, float]], ids) -> torch.Tensor:
    model = open_base(base)
    for folder, scale in adapters:
        for module, change in changes(folder).items():
            def add(_, inputs, output, change=change, scale=scale):
                return output + (inputs[0].double() @ change.T * scale).to(output.dtype)
            model.get_submodule(module).register_forward_hook(add)
    return logits_of(model, ids)


def main() -> None:
    for name, (folder, adapters) in BASES.items():
        base, out = HERE.parent / folder, HERE / name
        shutil.rmtree(out, ignore_errors=True)
        for adapter, (settings, dtype) in adapters.items():
            make_adapter(out / adapter, base, settings, dtype)
        n_vocab = open_base(base).config.vocab_size
        rng = torch.Generator().manual_seed(seed_of(name))
        ids = torch.randint(3, n_vocab, (N_TOKENS,), generator=rng).to(torch.int32)
        ternary = name == "bitnet"
        run = beside if ternary else merged
        plain = run(base, [], ids)
        tensors = {"input_ids": ids}
        for adapter in adapters:
            logits = run(base, [(out / adapter, 1.0)], ids)
            peft = logits_of(PeftModel.from_pretrained(open_base(base) if ternary else open_base(base).double(), out / adapter).eval(), ids)
            difference, effect = (peft - logits).abs().max(), (plain - logits).abs().max()
            print(f"{name}/{adapter}: {difference:.1e} from PEFT's own, {effect:.2f} from the model without")
            assert effect > 0.5 and difference < (0.5 if ternary else 1e-3)
            tensors[f"logits.{adapter}"] = logits.float()
        both = list(zip((out / adapter for adapter in adapters), TOGETHER))
        tensors["logits.together"] = run(base, both, ids).float()
        save_file(tensors, out / "reference.safetensors")


main()
