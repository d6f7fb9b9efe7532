"""What the reference models share: random weights, ternary packing, and the reference file with its logits.

Needs torch, transformers 5.23, accelerate, safetensors and numpy.
"""
import hashlib
import json
import os
import warnings
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the ternary layers are decorated with torch.compile

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
warnings.filterwarnings("ignore")
torch.set_num_threads(1)

N_TOKENS = 40
N_GREEDY = 24


def seed_of(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def model_from(config: dict):
    """A transformers model in f32 with the graph that a `config.json` describes, without its ternary layers."""
    config = {k: v for k, v in json.loads(json.dumps(config)).items() if k != "quantization_config"}
    parsed = AutoConfig.for_model(**config)
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_config(parsed, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def random_state(name: str, config: dict, std: float, embed_std: float, head_std: float) -> dict[str, torch.Tensor]:
    """Random weights under their Hugging Face names, in f32.

    Norms and biases are random too, so that none of them can be left out unnoticed. Gemma's norms are offsets from one.
    """
    rng = torch.Generator().manual_seed(seed_of(name))
    state = {}
    model = model_from(config)
    tied = {k for k in model.state_dict() if k == "lm_head.weight"} if model.config.tie_word_embeddings else set()
    offset = 0.0 if "gemma" in model.config.model_type else 1.0
    for key, value in model.state_dict().items():
        if key in tied:
            continue
        noise = torch.randn(value.shape, generator=rng)
        if key.endswith(".bias"):
            state[key] = noise * 0.3
        elif value.ndim == 1:
            state[key] = noise * 0.2 + offset
        elif "embed_tokens" in key:
            state[key] = noise * embed_std
        elif "lm_head" in key:
            state[key] = noise * head_std
        else:
            state[key] = noise * std
    return state


def ternarise(weight: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Codes −1, 0, 1 and the multiplier mean(abs W) of a float matrix."""
    scale = 1.0 / weight.abs().mean().clamp(min=1e-5)
    return (weight * scale).round().clamp(-1, 1), float(1.0 / scale)


def pack_quarters(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [out/4, in]: bits 2i+1:2i of row p are the code plus one of row i·out/4 + p."""
    rows = codes.shape[0] // 4
    assert rows * 4 == codes.shape[0], "the packed form holds whole quarters of the rows only"
    quarters = (codes + 1).to(torch.uint8).reshape(4, rows, codes.shape[1])
    return quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6


def packed_state(state: dict, is_ternary, divides: bool) -> dict:
    """Replaces the matrices that `is_ternary(name)` chooses by packed codes and a scale of one bf16."""
    out = {}
    for key, value in state.items():
        if not (key.endswith(".weight") and value.ndim == 2 and is_ternary(key.removesuffix(".weight"))):
            out[key] = value.to(torch.bfloat16)
            continue
        codes, multiplier = ternarise(value)
        out[key] = pack_quarters(codes)
        scale = 1.0 / multiplier if divides else multiplier
        out[key + "_scale"] = torch.tensor([scale], dtype=torch.bfloat16)
    return out


def write_config(folder: Path, config: dict) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load(folder: Path):
    """The model of a folder, computing in f32. Ternary layers keep their stored bf16 unless told otherwise."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for module in model.modules():
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.float()
        if type(module).__name__ == "BitLinear":
            module.dtype = torch.float32
    return model


@torch.no_grad()
def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids.long()[None], use_cache=False).logits[0].float()


def input_ids(name: str, n_vocab: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed_of(name) ^ 1)
    return torch.randint(3, n_vocab, (N_TOKENS,), generator=rng).to(torch.int32)


@torch.no_grad()
def reference_of(model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of `reference.safetensors`: one pass over the ids, then greedy tokens through the cache."""
    logits = logits_of(model, ids)
    step = model(input_ids=ids.long()[None], use_cache=True)
    greedy, margins = [], []
    for _ in range(N_GREEDY):
        last = step.logits[0, -1].float()
        best = last.topk(2).values
        greedy.append(int(last.argmax()))
        margins.append(float(best[0] - best[1]))
        step = model(input_ids=torch.tensor([[greedy[-1]]]), past_key_values=step.past_key_values, use_cache=True)
    return {
        "input_ids": ids,
        "logits": logits.contiguous(),
        "greedy_ids": torch.tensor(greedy, dtype=torch.int32),
        "greedy_margins": torch.tensor(margins, dtype=torch.float32),
    }


def folder_bytes(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


assert transformers.__version__.startswith("5.23."), transformers.__version__
