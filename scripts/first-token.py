#!/usr/bin/env python3
"""Time from starting a process to the first token on its standard output, and its peak memory.

    scripts/first-token.py target/release/sterna model.gguf --threads 1,2
    scripts/first-token.py target/release/sterna bundle --worker

With `--worker` the process is `sterna worker`, which is asked for tokens behind a prompt of one at once,
in version 1 of its protocol, and the first token is the first line of its reply.

Each run is a new process on a warm page cache: the model is read before every run, because some
systems take files out of the cache within minutes. Thread counts take turns. The time begins before
the process exists and ends with the first byte of text; peak memory is what the system says
(`ru_maxrss`), in which mapped pages count. The prompt is cut to the given number of tokens. One decode
step, to compare with, is the median time between later tokens of the same runs.
"""

import argparse
import json
import os
import statistics
import subprocess
import time

TEXT = "Once upon a time there was a little girl who liked to walk in the park. " * 20


def read(path):
    """Brings a file, or all files of a folder, into the page cache; returns the bytes."""
    if os.path.isdir(path):
        return sum(read(entry.path) for entry in os.scandir(path) if entry.is_file())
    n_bytes = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 24):
            n_bytes += len(block)
    return n_bytes


def prompt_of(n_tokens, sterna, model):
    """A text of `n_tokens` tokens in the model's own vocabulary."""
    for n_chars in range(1, len(TEXT)):
        command = [sterna, "tokenize", model, "--text", TEXT[:n_chars], "--json"]
        tokens = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        if len(tokens["ids"]) >= n_tokens:
            return TEXT[:n_chars], len(tokens["ids"])
    raise SystemExit(f"{model}: no prompt of {n_tokens} tokens")


def run(command, said=b""):
    """Runs `command`, to which `said` is said; returns seconds to each write on its output, peak bytes and
    CPU seconds."""
    out, inherited = os.pipe()
    heard, into = os.pipe()
    os.write(into, said)
    actions = [
        (os.POSIX_SPAWN_DUP2, heard, 0),
        (os.POSIX_SPAWN_CLOSE, into),
        (os.POSIX_SPAWN_DUP2, inherited, 1),
        (os.POSIX_SPAWN_CLOSE, out),
        (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
    ]
    start = time.monotonic()
    pid = os.posix_spawnp(command[0], command, os.environ, file_actions=actions)
    os.close(inherited)
    os.close(heard)
    times = []
    while os.read(out, 1 << 16):
        times.append(time.monotonic() - start)
    os.close(out)
    os.close(into)
    _, status, usage = os.wait4(pid, 0)
    if status != 0 or not times:
        raise SystemExit(f"{' '.join(command)}: failed, status {status}")
    return times, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime


def worker(sterna, model, n_threads):
    """The command of a worker on so many threads, and what is said to it: a request, and the end."""
    printed = subprocess.run(
        [sterna, "worker", "--print-config", model], capture_output=True, check=True, text=True
    )
    config = printed.stdout.split()
    config[16] = str(n_threads)
    request = "1 1 0 0 1 1 0 6 1 0".split()
    said = "".join(f"{line}\n" for line in request).encode()
    return [sterna, "worker", model, "--config", *config], said


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sterna")
    parser.add_argument("models", nargs="+", help="paths, or `builtin`")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--tokens", type=int, default=8, help="of the prompt")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--weights", default="auto", help="as sterna's flag")
    parser.add_argument("--worker", action="store_true", help="time `sterna worker`")
    args = parser.parse_args()
    for model in args.models:
        prompt, n_tokens = "", 1
        if not args.worker:
            prompt, n_tokens = prompt_of(args.tokens, args.sterna, model)
        runs = {int(n): [] for n in args.threads.split(",")}
        for _ in range(args.repetitions):
            for n_threads, results in runs.items():
                n_bytes = read(model) if os.path.exists(model) else None
                if args.worker:
                    results.append(run(*worker(args.sterna, model, n_threads)))
                    continue
                options = "--raw --temperature 0 --max-tokens 6".split()
                options += ["--prompt", prompt, "--threads", str(n_threads)]
                options += ["--weights", args.weights]
                results.append(run([args.sterna, "run", model, *options]))
        print(f"{model}: prompt of {n_tokens} tokens, medians of {args.repetitions}")
        for n_threads, results in runs.items():
            first = [1e3 * times[0] for times, _, _ in results]
            # The last write is the end of the line.
            steps = [1e3 * (b - a) for times, _, _ in results for a, b in zip(times, times[1:-1])]
            peak = max(peak for _, peak, _ in results)
            step = f"{statistics.median(steps):.0f} ms a step" if steps else "no steps"
            file = f" ({peak / n_bytes:.3f} of the file)" if n_bytes else ""
            print(
                f"  {n_threads} threads: first token after {statistics.median(first):.0f} ms "
                f"(from {min(first):.0f} to {max(first):.0f}), {step}, "
                f"{1e3 * statistics.median(cpu for _, _, cpu in results):.0f} ms of CPU in all, "
                f"peak {peak / 2**20:.0f} MiB{file}"
            )


if __name__ == "__main__":
    main()
