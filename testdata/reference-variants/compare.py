#!/usr/bin/env python3
"""Runs the engine over reference folders and prints how far its logits are from the references.

    compare.py path/to/sterna FOLDER...        each FOLDER holds models, one folder each, or is one

Three ways for each model: one prefill, prefill in chunks of 7, and token by token. Needs numpy and safetensors.
"""
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

WAYS = {"prefill": [], "chunk 7": ["--chunk", "7"], "decode": ["--decode"]}


def nll(logits: np.ndarray, ids: np.ndarray) -> float:
    rows = logits[:-1].astype(np.float64)
    rows -= rows.max(-1, keepdims=True)
    logp = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    return float(-logp[np.arange(len(ids) - 1), ids[1:]].mean())


def run(engine: str, model: Path, ids: np.ndarray, flags: list[str]) -> np.ndarray | str:
    with tempfile.TemporaryDirectory() as tmp:
        ids_file, out = Path(tmp) / "ids.txt", Path(tmp) / "out.safetensors"
        ids_file.write_text(",".join(map(str, ids.tolist())))
        done = subprocess.run([engine, "logits", str(model), "--ids-file", str(ids_file), "-o", str(out), *flags],
                              capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            return " ".join(lines)[:160] if lines else f"exit code {done.returncode}"
        return load_file(out)["logits"]


def models(root: Path) -> list[Path]:
    if (root / "reference.safetensors").exists():
        return [root]
    return sorted(f.parent for f in root.glob("*/reference.safetensors"))


def main() -> None:
    engine, roots = sys.argv[1], sys.argv[2:]
    print("| model | way | max difference | difference of mean NLL | top-1 |\n|---|---|---|---|---|")
    for folder in (m for root in roots for m in models(Path(root))):
        reference = load_file(folder / "reference.safetensors")
        ids, truth = reference["input_ids"], reference["logits"]
        parts = sorted(folder.glob("*.gguf"))
        for way, flags in WAYS.items():
            got = run(engine, parts[0] if parts else folder, ids, flags)
            if isinstance(got, str):
                print(f"| {folder.name} | {way} | {got} | | |", flush=True)
                continue
            note = ""
            if "logits_float_activations" in reference:
                note = f" (float activations: {np.abs(got - reference['logits_float_activations']).max():.1e})"
            print(f"| {folder.name} | {way} | {np.abs(got - truth).max():.1e}{note} | {abs(nll(got, ids) - nll(truth, ids)):.1e} "
                  f"| {(got.argmax(-1) == truth.argmax(-1)).mean():.0%} |", flush=True)


if __name__ == "__main__":
    main()
