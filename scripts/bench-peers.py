#!/usr/bin/env python3
"""Compare `sterna bench` with llama.cpp on the same GGUF files, and print a Markdown table.

    scripts/bench-peers.py --python VENV/bin/python model.gguf [more.gguf ...]
    scripts/bench-peers.py --threads 1,2 --prefill 128 --decode 32 --rounds 5 model.gguf

Both engines take turns, in a new process each time, and each warms up before it is timed; who begins
changes from round to round. Rates are medians of the rounds, ± half the distance of the quartiles, and
ratios are medians of the rounds' own ratios, so that what else the machine does meets both alike. At one
thread ratios by CPU time are given too, which other programs disturb less.

llama.cpp is run through llama-cpp-python (`pip install llama-cpp-python`), which may be installed for
another Python than the one that runs this: name it with --python. llama.cpp keeps its f16 cache of keys
and values; it computes `bitnet` files with another activation function, which changes answers, not speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]

REPOSITORY = Path(__file__).resolve().parent.parent

# Exit status of the peer's process when Python doesn't find llama_cpp.
NO_LLAMA_CPP = 3


class BenchError(Exception):
    """Something that the person who runs this can act on."""


@dataclasses.dataclass(frozen=True)
class Rate:
    """Tokens per second in one test."""

    wall: float
    # By CPU time; only at one thread, where it means something.
    cpu: float | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured."""

    prefill: list[int]
    decode: list[int]
    n_rounds: int

    def tests(self) -> list[str]:
        """Names of the tests, as `sterna bench` spells them."""
        return [f"pp{n}" for n in self.prefill] + [f"tg{n}" for n in self.decode]


# Of each test, what one process measured.
Rates = dict[str, Rate]


def main() -> int:
    """Runs what the command line asks for; returns the exit status."""
    args = parse_args()
    if args.peer:
        return run_peer(args.models, args.threads[0], args.prefill, args.decode)
    try:
        print(compare(args))
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL.gguf", help="files to run")
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="PATH",
        help="Python that has llama_cpp [default: the one that runs this]",
    )
    parser.add_argument(
        "--sterna",
        default=str(REPOSITORY / "target/release/sterna"),
        metavar="PATH",
        help="program to measure [default: the release build of this checkout]",
    )
    numbers = {"type": positive_numbers, "metavar": "N,..."}
    parser.add_argument("--threads", default=[1, 2], help="thread counts [default: 1,2]", **numbers)
    parser.add_argument("--prefill", default=[128], help="prompt lengths [default: 128]", **numbers)
    parser.add_argument("--decode", default=[32], help="tokens to decode [default: 32]", **numbers)
    parser.add_argument(
        "--rounds", type=positive_number, default=5, metavar="N", help="turns of each [default: 5]"
    )
    # How this script starts itself in the other Python: no models asks for the version.
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.models and not args.peer:
        parser.error("expected at least one GGUF file")
    return args


def positive_number(text: str) -> int:
    """A number of at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, found {text}")
    return number


def positive_numbers(text: str) -> list[int]:
    """Numbers of at least one, separated by commas."""
    return [positive_number(part) for part in text.split(",")]


# ---- Both engines in turns


def compare(args: argparse.Namespace) -> str:
    """Measures all models with both engines; the Markdown to print."""
    plan = Plan(args.prefill, args.decode, args.rounds)
    for model in args.models:
        if not Path(model).is_file():
            raise BenchError(f"{model}: no such file")
    peer = ask_peer(args.python, [])
    machine: Json = {}
    rows: list[str] = []
    for model in args.models:
        for threads in args.threads:
            sterna: list[tuple[Rates, Json]] = []
            llama: list[Rates] = []

            def measure_sterna() -> None:
                sterna.append(run_sterna(args.sterna, model, threads, plan))

            def measure_llama() -> None:
                llama.append(run_llama(args.python, model, threads, plan))

            turns: list[Callable[[], None]] = [measure_sterna, measure_llama]
            for i in range(plan.n_rounds):
                name = Path(model).name
                print(f"{name}, threads {threads}, round {i + 1}/{plan.n_rounds}", file=sys.stderr)
                for turn in turns:
                    turn()
                turns.reverse()
            machine = sterna[-1][1]
            rows += table_rows(model, threads, plan, sterna, llama)
    header = [
        f"{machine['cpu']}, {platform.platform()}, {machine['available_threads']} threads available.",
        f"sterna {machine['version']}{commit_of(args.sterna, machine)}, {machine['instruction_set']}; "
        f"llama-cpp-python {peer['version']} ({peer['features']}).",
        f"`{shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`",
        "",
        "| model | threads | test | sterna | share of the machine | llama.cpp | ratio | by CPU time |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(header + rows)


def commit_of(sterna: str, machine: Json) -> str:
    """What was built, as far as can be told."""
    if machine.get("commit"):
        return f" at {machine['commit']}"
    if REPOSITORY not in Path(sterna).resolve().parents:
        return ""
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f" in a checkout at {found.stdout.strip()}"


def table_rows(
    model: str,
    threads: int,
    plan: Plan,
    sterna: Sequence[tuple[Rates, Json]],
    llama: Sequence[Rates],
) -> list[str]:
    """A row for each test; rounds stand beside each other."""
    rows = []
    for test in plan.tests():
        ours = [rates[test] for rates, _ in sterna]
        theirs = [rates[test] for rates in llama]
        ratio = statistics.median(a.wall / b.wall for a, b in zip(ours, theirs))
        by_cpu = [a.cpu / b.cpu for a, b in zip(ours, theirs) if a.cpu and b.cpu]
        cells = [
            Path(model).stem,
            str(threads),
            test,
            summary([rate.wall for rate in ours]),
            share_text(test, [report for _, report in sterna]),
            summary([rate.wall for rate in theirs]),
            f"**{ratio:.2f}**",
            f"{statistics.median(by_cpu):.2f}" if by_cpu else "",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def summary(values: list[float]) -> str:
    """The median, ± half the distance of the quartiles where there are several values."""
    text = f"{statistics.median(values):.1f}"
    if len(values) > 1:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        text += f" ± {(high - low) / 2:.1f}"
    return text


def share_text(test: str, reports: list[Json]) -> str:
    """What sterna reached of what it measured beside: of the bandwidth, or of the peak."""
    results = [find_result(report, test) for report in reports]
    for key, what in [("bandwidth_share", "bandwidth"), ("peak_share", "integer peak")]:
        shares = [result[key] for result in results if result[key] is not None]
        if shares:
            return f"{statistics.median(shares) * 100:.0f} % of {what}"
    return ""


# ---- sterna


def run_sterna(program: str, model: str, threads: int, plan: Plan) -> tuple[Rates, Json]:
    """Measures once; the rates, and all of the report."""
    command = [program, "bench", model, "--json", "-r", "1", "-t", str(threads)]
    command += ["-p", ",".join(map(str, plan.prefill)), "-n", ",".join(map(str, plan.decode))]
    report = run_json(command)
    rates = {}
    for test in plan.tests():
        result = find_result(report, test)
        rates[test] = Rate(result["median"], result["cpu_median"])
    return rates, report


def find_result(report: Json, test: str) -> Json:
    """The result of `test` in a report of one thread count."""
    for result in report["runs"][0]["results"]:
        if result["test"] == test:
            found: Json = result
            return found
    raise BenchError(f"sterna bench reported no {test}")


# ---- llama.cpp, in a process of its own


def run_llama(python: str, model: str, threads: int, plan: Plan) -> Rates:
    """Measures once."""
    tests = ["--prefill", ",".join(map(str, plan.prefill))]
    tests += ["--decode", ",".join(map(str, plan.decode))]
    report = ask_peer(python, [model, "--threads", str(threads), *tests])
    return {test: Rate(*rate) for test, rate in report["rates"].items()}


def ask_peer(python: str, args: list[str]) -> Json:
    """What this script prints as a peer, run by `python`."""
    return run_json([python, os.fspath(Path(__file__).resolve()), "--peer", *args])


def run_json(command: list[str]) -> Json:
    """Runs `command`, which must print one JSON object."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BenchError(f"cannot run {command[0]}: {error.strerror}") from error
    if found.returncode == NO_LLAMA_CPP and "--peer" in command:
        raise BenchError(
            f"{command[0]} has no llama_cpp: run `{command[0]} -m pip install llama-cpp-python`, "
            "or name another Python with --python"
        )
    if found.returncode != 0:
        raise BenchError(f"{shlex.join(command)} failed:\n{found.stderr.strip()}")
    try:
        report: Json = json.loads(found.stdout)
    except json.JSONDecodeError as error:
        raise BenchError(f"{shlex.join(command)}: expected JSON, found `{found.stdout}`") from error
    return report


def run_peer(models: list[str], threads: int, prefill: list[int], decode: list[int]) -> int:
    """Measures llama.cpp once and prints its rates, or its version if there is no model."""
    try:
        import llama_cpp
    except ImportError:
        return NO_LLAMA_CPP
    if not models:
        info = llama_cpp.llama_print_system_info().decode()
        features = [part.split("=")[0].split(":")[-1].strip() for part in info.split("|") if "= 1" in part]
        print(json.dumps({"version": llama_cpp.__version__, "features": " ".join(features)}))
        return 0
    longest = max(prefill + decode)
    llama = llama_cpp.Llama(
        models[0],
        n_ctx=longest + 8,
        n_batch=max(512, longest),
        n_ubatch=512,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )
    n_vocab = llama.n_vocab()
    # Spread over the vocabulary, as those of `sterna bench` are.
    ids = [i * 2654435769 % 2**32 * n_vocab >> 32 for i in range(1, longest + 1)]

    def timed(n: int, chunk: int) -> tuple[float, float | None]:
        """Rates by wall clock and CPU time of `n` tokens, `chunk` at a time, from an empty cache."""
        llama.reset()
        wall, cpu = time.perf_counter(), time.process_time()
        for i in range(0, n, chunk):
            llama.eval(ids[i : min(i + chunk, n)])
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return n / wall, n / cpu if threads == 1 else None

    rates = {}
    # All once without counting, as `sterna bench` does.
    for _ in range(2):
        for n in prefill:
            rates[f"pp{n}"] = timed(n, n)
        for n in decode:
            rates[f"tg{n}"] = timed(n, 1)
    print(json.dumps({"rates": rates}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
