"""Starts a worker, has it generate, and kills it, a thousand times; says what that leaves behind.

Usage: python3 scripts/worker-cycles.py target/release/sterna [--model builtin] [--cycles 1000]

Every third worker is killed, every third loses its reader, and every third its parent, which is killed
while others hold the other ends of its pipes. Counted are processes of the program, files in TMPDIR and
entries of /dev/shm. Linux only.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time

# Continues without an end, at a temperature at which replies are long.
REQUEST = b"1\n1\n2.0\n0\n1\n1\n0\n0\n3\n"


def processes(program):
    """Ids of the processes that run `program`, those that have ended left out."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.path.samefile(f"/proc/{entry}/exe", program):
                found.append(int(entry))
        except OSError:
            pass
    return found


def start(command, env):
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)


def kill_worker(command, env):
    worker = start(command, env)
    worker.stdin.write(REQUEST)
    worker.stdin.flush()
    worker.stdout.readline()
    worker.kill()
    worker.wait()
    worker.stdin.close()
    worker.stdout.close()


def close_pipes(command, env):
    worker = start(command, env)
    worker.stdin.write(REQUEST)
    worker.stdin.flush()
    worker.stdout.readline()
    worker.stdin.close()
    worker.stdout.close()
    if worker.wait(timeout=30) != 0:
        sys.exit(f"exit code {worker.returncode} of a worker whose pipes were closed")


def kill_parent(command, env):
    read, write = os.pipe()
    keep = os.dup(write)
    out_read, out_write = os.pipe()
    parent = os.fork()
    if parent == 0:
        worker = subprocess.Popen(command, stdin=read, stdout=out_write, env=env)
        worker.wait()
        os._exit(0)
    os.write(write, REQUEST)
    os.read(out_read, 1)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    for end in (read, write, keep, out_read, out_write):
        os.close(end)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--cycles", type=int, default=1000)
    args = parser.parse_args()
    program = os.path.abspath(args.program)
    printed = subprocess.run([program, "worker", "--print-config", args.model], capture_output=True, check=True)
    command = [program, "worker", args.model, "--config", *printed.stdout.decode().split()]
    before = set(processes(program))
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as scratch:
        env = {**os.environ, "TMPDIR": scratch}
        ways = [kill_worker, close_pipes, kill_parent]
        times = []
        for i in range(args.cycles):
            begin = time.monotonic()
            ways[i % len(ways)](command, env)
            times.append(time.monotonic() - begin)
        begin = time.monotonic()
        while set(processes(program)) - before and time.monotonic() - begin < 10:
            time.sleep(0.05)
        left = set(processes(program)) - before
        files = os.listdir(scratch)
    new_shared = set(os.listdir("/dev/shm")) - shared
    print(f"{args.cycles} cycles, {1e3 * statistics.median(times):.0f} ms each (median)")
    print(f"processes left: {len(left)}; files in TMPDIR: {len(files)}; in /dev/shm: {len(new_shared)}")
    if left or files or new_shared:
        sys.exit(1)


if __name__ == "__main__":
    main()
