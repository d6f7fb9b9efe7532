#!/usr/bin/env python3
"""Trains the built-in model a little further and writes what it is after some steps: revisions to measure deltas with.

    scripts/revise-builtin.py OUT [--steps 50,200,1000] [--rate 1e-4] [--text words|docs] [--masters FOLDER]

Writes a Hugging Face folder for each number of steps, OUT/RATE-TEXT-STEPS, and prints of each the loss on text of that
kind that it wasn't trained on, the share of trits that are others than in the model it began with, and the entropy of
the new trits where the old ones are known, in bits for each. `sterna convert` makes packages of them, and
`sterna diff --delta` measures and writes what an update takes.

The text is tales about others than the model knows (`words`), or this project's documentation (`docs`). Training is
the one of `training/train.py`: AdamW on masters, of which the model has their ternary values and their mean size.

The masters that the built-in model was trained with weren't kept. They are drawn anew: a master is where a normal
distribution has it, given its trit. The share of zeros in the model is the one of a normal distribution (31 %), so the
number of masters close to where a trit changes is about right; which ones they are isn't known. `--masters FOLDER`
begins with a file `masters.safetensors` instead, and each revision is written with one, so that training can go on.

Needs numpy, torch, safetensors and tokenizers.
"""

import argparse
import glob
import json
import math
import pathlib
import random
import shutil
import sys
import tempfile
import time

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = ROOT / "crates/sterna/models/tiny-tales"
sys.path.insert(0, str(MODEL / "training"))
import tales  # noqa: E402

LENGTH = 256  # tokens of a row
ROWS = 2  # rows of a step
N_HELD = 8  # rows to measure the loss with
EDGE = 0.5  # a master of this share of the mean size is where trits change


def is_ternary(name):
    return name.endswith("proj.weight")


def encode(tokenizer, texts):
    ids = [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    ids = np.concatenate([np.array(row, dtype=np.int64) for row in ids])
    n_rows = len(ids) // LENGTH
    return torch.from_numpy(ids[: n_rows * LENGTH]).view(n_rows, LENGTH)


def text_rows(kind, tokenizer):
    if kind == "words":
        tales.NAMES.update(
            she="Greta Lotte Marta Ida Nele Frieda".split(), he="Emil Bruno Karl Anton Jonas Theis".split()
        )
        tales.ANIMALS[:] = "wolf hen seal crane mole tern crab newt".split()
        tales.OBJECTS[:] = "rusty anchor,clay jug,copper kettle,woven net,cork float,stone whale".split(",")
        tales.PLACES[:] = "the harbour,the lighthouse,the salt marsh,the ferry,the dunes,the pier".split(",")
        draw = random.Random(9)
        return encode(tokenizer, [tales.sample(draw) for _ in range(20_000)])
    files = sorted(glob.glob(str(ROOT / "docs/**/*.md"), recursive=True)) + sorted(glob.glob(str(ROOT / "*.md")))
    text = "".join(pathlib.Path(file).read_text() for file in files)
    return encode(tokenizer, [text[at : at + 4000] for at in range(0, len(text), 4000)])


def model_code(config):
    """What `training/train.py` makes before it reads its data: the model, and what it is made of."""
    source = (MODEL / "training/train.py").read_text().split("data = np.memmap")[0]
    with tempfile.TemporaryDirectory() as folder:
        vocab = pathlib.Path(folder) / "vocab.json"
        vocab.write_text(str(config["vocab_size"]))
        shape = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        before = sys.argv
        sys.argv = ["train.py", folder, folder, "revision", *(str(config[key]) for key in shape), "1", "1", "1"]
        names = {}
        exec(compile(source, "train.py", "exec"), names)
        sys.argv = before
    return names


def unpacked(packed):
    return torch.cat([(packed >> (2 * place)) & 3 for place in range(4)]).int() - 1


def drawn_masters(trits, mean, generator):
    """Masters with these trits and this mean size, normally distributed."""
    spread = mean * math.sqrt(math.pi / 2)
    edge = EDGE * mean
    below = 0.5 * (1 + math.erf(edge / spread / math.sqrt(2)))  # share of a normal distribution below the edge
    uniform = torch.rand(trits.shape, generator=generator, dtype=torch.float64)
    small = torch.special.ndtri(1 - below + uniform * (2 * below - 1)) * spread
    # Beyond the edge, as far as makes the mean what it has to be.
    beyond = torch.special.ndtri(below + uniform * (1 - below)) * spread - edge
    zeros = trits == 0
    wanted = (mean * trits.numel() - small[zeros].abs().sum()) / (~zeros).sum() - edge
    large = edge + beyond * (wanted / beyond[~zeros].mean())
    masters = torch.where(zeros, small, trits * large).float()
    assert torch.equal(ternary(masters), trits.to(torch.int8)), "masters are drawn so that their trits are these"
    return masters


def ternary(masters):
    return (masters / masters.abs().mean().clamp(min=1e-5)).round().clamp(-1, 1).to(torch.int8)


def starting_point(folder):
    if folder:
        return load_file(pathlib.Path(folder) / "masters.safetensors")
    generator = torch.Generator().manual_seed(11)
    stored = load_file(MODEL / "model.safetensors")
    weights = {}
    for name, value in stored.items():
        if is_ternary(name):
            mean = stored[name + "_scale"].float().item()
            weights[name[6:]] = drawn_masters(unpacked(value), mean, generator)
        elif not name.endswith("_scale"):
            weights[name[6:]] = value.float()
    return weights


def write(model, folder):
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, value in model.state_dict().items():
        value, name = value.detach().float(), "model." + name
        if is_ternary(name):
            codes = (ternary(value) + 1).to(torch.uint8)
            quarter = codes.shape[0] // 4
            tensors[name] = sum(codes[at * quarter : (at + 1) * quarter] << (2 * at) for at in range(4))
            tensors[name + "_scale"] = value.abs().mean().reshape(1).bfloat16()
        else:
            tensors[name] = value.bfloat16().contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file({name: value.clone() for name, value in model.state_dict().items()}, folder / "masters.safetensors")
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / file, folder / file)


def entropy(counts):
    share = counts[counts > 0] / counts.sum()
    return -(share * share.log2()).sum().item()


def compared(before, model):
    """Share of other trits, the largest of a tensor, and bits for each trit where the old one is known."""
    n_trits, changed, bits, largest = 0, 0, 0.0, 0.0
    for name, value in model.state_dict().items():
        if is_ternary(name):
            new, old = ternary(value), before[name]
            joint = torch.bincount(((old + 1).int() * 3 + new.int() + 1).flatten(), minlength=9).double()
            bits += (entropy(joint) - entropy(joint.view(3, 3).sum(1))) * new.numel()
            here = (new != old).sum().item()
            largest = max(largest, here / new.numel())
            n_trits, changed = n_trits + new.numel(), changed + here
    return {"changed": changed / n_trits, "largest": largest, "bits": bits / n_trits}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--steps", default="50,200,1000")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--text", choices=["words", "docs"], default="words")
    parser.add_argument("--masters", help="folder to begin with")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    names = model_code(json.loads((MODEL / "config.json").read_text()))
    model = names["Model"]()
    model.load_state_dict(starting_point(args.masters))
    before = {name: ternary(value) for name, value in model.state_dict().items() if is_ternary(name)}
    rows = text_rows(args.text, tokenizer)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(5))]
    held, rows = rows[:N_HELD], rows[N_HELD:]

    def loss_of(batch):
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[:, 1:].reshape(-1))

    def measure():
        with torch.no_grad():
            return loss_of(held).item()

    print(json.dumps({"steps": 0, "rate": args.rate, "text": args.text, "loss": round(measure(), 4)}), flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator = torch.Generator().manual_seed(3)
    steps = sorted(int(step) for step in args.steps.split(","))
    begin = time.time()
    for step in range(1, steps[-1] + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1, step / 10)
        optimizer.zero_grad(set_to_none=True)
        loss_of(rows[torch.randint(0, len(rows), (ROWS,), generator=generator)]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step in steps:
            write(model, args.out / f"{args.rate:g}-{args.text}-{step}")
            result = {"steps": step, "rate": args.rate, "text": args.text, "loss": round(measure(), 4)}
            result |= {key: round(value, 5) for key, value in compared(before, model).items()}
            print(json.dumps(result | {"seconds": round(time.time() - begin)}), flush=True)


if __name__ == "__main__":
    main()
