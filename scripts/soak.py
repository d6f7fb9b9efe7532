#!/usr/bin/env python3
"""Mixed load on `sterna serve` for a while: does every request get what it should, and does memory stay?

    scripts/soak.py [--seconds 60] [--workers 12] [--pause 0] [--program target/release/sterna] [--seed 1] [--json FILE]

Starts a server of the built-in model, with keys and a small cache, and asks it from several threads: short and long
answers, whole and streamed, long prompts, schemas, vectors, clients that go away, that read slowly, that send nonsense
or have no key; and operators who each second load and unload an adapter, replace groups of the weights of a second
model by those of other revisions of it, and load and unload a third one, while all of them answer. Prints requests by
kind and outcome, times to the first token and between tokens, and the server's memory as it goes; ends with status 1 if
a request had another outcome than it should, an answer was another one the second time or has the weights of two
revisions, something is left over at the end, or memory grows.

Only the standard library; memory is read from /proc, and elsewhere not judged.
"""

import argparse
import array
import collections
import http.client
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

STALL = 120  # seconds in which something has to come
CACHE = 16 << 20  # bytes, less than memory may grow: a slow machine may fill it late
GROWTH = 32 << 20  # bytes that memory may grow in the judged part of a run, or
GROWTH_SHARE = 0.15  # this share of what it was
EVERY = 1.0  # seconds from one swap to the next
PLACES = ["Rome", "Oslo", "Lima"]
NAMES = ["Ruby", "Max", "Lily", "Tom"]
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": PLACES}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["place", "n"],
    "additionalProperties": False,
}


# Layers that are others in each revision.
LAYERS = (2, 5)
REVISIONS = ([], [LAYERS[0]], [*LAYERS])


class Wrong(Exception):
    """A request that didn't get what it should."""


def adapter(folder, salt):
    """A LoRA adapter of the built-in model, as PEFT saves it; each salt has its own."""
    rank, width, layers = 2, 256, 8
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj", "o_proj"]})
    )
    header, values, numbers = {}, array.array("f"), random.Random(salt)
    for layer in range(layers):
        for module in ("q_proj", "o_proj"):
            for factor, shape in (("A", [rank, width]), ("B", [width, rank])):
                begin = 4 * len(values)
                values.extend(numbers.uniform(-0.15, 0.15) for _ in range(rank * width))
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{factor}.weight"
                header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, 4 * len(values)]}
    head = json.dumps(header).encode()
    data = struct.pack("<Q", len(head)) + head + values.tobytes()
    (folder / "adapter_model.safetensors").write_bytes(data)
    return folder


def with_other_layers(model, folder, layers):
    """A copy of the built-in model's folder `model`, in which the rows of some matrices of `layers` come later."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("training", "*.md", "expected.json"))
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:begin])
    for layer in layers:
        for module in ("self_attn.v_proj", "mlp.down_proj"):
            tensor = header[f"model.layers.{layer}.{module}.weight"]
            row = tensor["shape"][1]
            start, end = (begin + offset for offset in tensor["data_offsets"])
            data[start:end] = data[end - row : end] + data[start : end - row]
    file.write_bytes(data)
    return folder


class Server:
    """The program, and what it said."""

    def __init__(self, program, scratch):
        def key(name):
            made = subprocess.run([program, "serve", "--new-api-key", name], capture_output=True, text=True, check=True)
            return made.stdout.split("\n")[:2]

        (self.key, line), (self.admin, admin_line) = key("client"), key("operator")
        (scratch / "keys").write_text(f"{line}\n{admin_line} admin\n")
        self.log = open(scratch / "log", "w+")
        # Another copy of the built-in model, in three revisions: of two layers, each is as it was or another one.
        tales = pathlib.Path(__file__).resolve().parent.parent / "crates/sterna/models/tiny-tales"
        self.revisions = []
        for number, layers in enumerate(REVISIONS):
            folder = with_other_layers(tales, scratch / f"layers-{number}", layers)
            package = scratch / f"revision-{number}"
            subprocess.run([program, "convert", "--quiet", folder, package], check=True, stdout=subprocess.DEVNULL)
            self.revisions.append(str(package))
        # And one that is there only now and then.
        self.visitor = str(with_other_layers(tales, scratch / "visitor", []))
        shutil.copytree(self.revisions[0], scratch / "tale")
        flags = ["builtin", str(scratch / "tale"), "--no-files", "--ctx", "4096", "--port", "0", "--api-keys", str(scratch / "keys")]
        flags += ["--parallel", "8", "--queue", "64", "--cache-memory", str(CACHE)]
        self.process = subprocess.Popen(
            [program, "serve", *flags], stdout=subprocess.PIPE, stderr=self.log, text=True, env={**os.environ, "STERNA_HOME": str(scratch / "home")}
        )
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the server did not start: {self.said()}")
        self.address = line.strip().removeprefix("http://").rstrip("/")

    def said(self):
        self.log.seek(0)
        return self.log.read()

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.log.close()

    def memory(self):
        """Bytes in memory; None where /proc isn't there."""
        try:
            pages = pathlib.Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return None
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def open(self):
        return http.client.HTTPConnection(self.address, timeout=STALL)

    def send(self, connection, method, path, body=None, key=None):
        head = {"Content-Type": "application/json", "Authorization": f"Bearer {key or self.key}"}
        connection.request(method, path, body if isinstance(body, (bytes, type(None))) else json.dumps(body), head)
        return connection.getresponse()

    def ask(self, method, path, body=None, key=None, expect=200):
        """A whole response; its JSON, if it is some."""
        connection = self.open()
        try:
            response = self.send(connection, method, path, body, key)
            text = response.read()
        finally:
            connection.close()
        if response.status != expect:
            raise Wrong(f"{method} {path}: expected status {expect}, found {response.status}: {text[:200]!r}")
        is_json = (response.getheader("content-type") or "").startswith("application/json")
        return json.loads(text) if is_json else text.decode()


class Load:
    """What is asked, and what became of it."""

    def __init__(self, server, scratch, seed, pause):
        self.server, self.seed, self.pause = server, seed, pause
        self.lock = threading.Lock()
        self.outcomes = collections.Counter()
        self.failures = []
        self.first, self.between = array.array("d"), array.array("d")
        self.answers = {}
        self.adapters = [adapter(scratch / f"adapter-{salt}", salt) for salt in range(4)]
        self.ending = threading.Event()
        self.kinds = {
            self.short: 30,
            self.streamed: 25,
            self.long_prompt: 5,
            self.schema: 10,
            self.vectors: 8,
            self.cancelled: 12,
            self.slow: 3,
            self.stalled: 2,
            self.malformed: 15,
            self.looked_at: 5,
            self.of_one_revision: 10,
        }
        # Each of one thread alone.
        self.operators = [self.adapters_come_and_go, self.groups_are_swapped, self.models_come_and_go]
        # Whether each of the layers that revisions have in two forms is the other one, in the second model.
        self.tale = server.ask("GET", "/v1/models")["data"][1]["id"]
        self.state = (False, False)
        # The answers of each of these to the same requests, of which each stream has to be one.
        self.tales = {}
        for revision, groups in ((1, None), (2, None), (0, self.groups(LAYERS[0])), (0, None)):
            self.swap(revision, groups)
            texts = [self.tell(seed, 40) for seed in range(2)]
            if texts in self.tales.values():
                raise SystemExit(f"swaps: expected other answers of other weights, found the same: {texts}")
            self.tales[self.state] = texts

    def same(self, what, answer):
        """Equal requests have equal answers, whatever else is asked."""
        with self.lock:
            if self.answers.setdefault(what, answer) != answer:
                raise Wrong(f"{what}: another answer than before: {answer[:100]!r}")

    def chat(self, numbers, **more):
        name, seed = numbers.choice(NAMES), numbers.randrange(4)
        messages = [{"role": "user", "content": f"Tell me a story about a fox named {name}."}]
        return (name, seed), {"model": "builtin", "messages": messages, "seed": seed, **more}

    def short(self, numbers):
        what, body = self.chat(numbers, max_tokens=16)
        answer = self.server.ask("POST", "/v1/chat/completions", body)
        self.same(("short", *what), answer["choices"][0]["message"]["content"])

    def events(self, body):
        """The response to a streamed request, its connection, and the data of its events as they come."""
        connection = self.server.open()
        response = self.server.send(connection, "POST", "/v1/chat/completions", {**body, "stream": True})
        if response.status != 200:
            raise Wrong(f"streamed: expected status 200, found {response.status}: {response.read()[:200]!r}")

        def data():
            while line := response.readline():
                if line.startswith(b"data: "):
                    yield line[6:].strip()

        return connection, response, data()

    def read(self, body, pause=0.0):
        """The text of a streamed answer, and when its pieces came."""
        connection, response, data = self.events(body)
        text, times, is_over = "", [], False
        try:
            for event in data:
                if event == b"[DONE]":
                    is_over = True
                    break
                chunk = json.loads(event)
                if "error" in chunk:
                    raise Wrong(f"streamed: {chunk['error']}")
                if piece := chunk["choices"][0]["delta"].get("content"):
                    times.append(time.monotonic())
                    text += piece
                    if pause:
                        time.sleep(pause)
        finally:
            response.close()
            connection.close()
        if not is_over:
            raise Wrong(f"streamed: the answer broke off after {len(text)} characters")
        return text, times

    def streamed(self, numbers):
        what, body = self.chat(numbers, max_tokens=200)
        begun = time.monotonic()
        text, times = self.read(body)
        self.same(("streamed", *what), text)
        with self.lock:
            self.first.extend(at - begun for at in times[:1])
            self.between.extend(b - a for a, b in zip(times, times[1:]))

    def long_prompt(self, numbers):
        words = numbers.choices(["the", "fox", "went", "to", "see", "a", "small", "tree", "."], k=1200)
        body = {"model": "builtin", "prompt": " ".join(words), "max_tokens": 16, "ignore_eos": True}
        answer = self.server.ask("POST", "/v1/completions", body)
        if answer["usage"]["completion_tokens"] != 16:
            raise Wrong(f"long prompt: expected 16 tokens, found {answer['usage']}")

    def schema(self, numbers):
        form = {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}
        _, body = self.chat(numbers, response_format=form, max_tokens=100)
        answer = self.server.ask("POST", "/v1/chat/completions", body)
        found = json.loads(answer["choices"][0]["message"]["content"])
        if found["place"] not in PLACES or found["n"] not in range(10):
            raise Wrong(f"schema: {found}")

    def vectors(self, numbers):
        body = {"model": "builtin", "input": ["a fox", numbers.choice(NAMES)], "pooling": "mean"}
        answer = self.server.ask("POST", "/v1/embeddings", body)
        if [len(one["embedding"]) for one in answer["data"]] != [256, 256]:
            raise Wrong("vectors: expected two of 256 elements")

    def cancelled(self, numbers):
        _, body = self.chat(numbers, max_tokens=2000, ignore_eos=True)
        connection, response, data = self.events(body)
        for _ in zip(range(numbers.randrange(20)), data):
            pass
        response.close()
        connection.close()

    def slow(self, numbers):
        what, body = self.chat(numbers, max_tokens=60)
        text, _ = self.read(body, pause=0.03)
        self.same(("slow", *what), text)

    def stalled(self, numbers):
        """Reads nothing, then goes away."""
        _, body = self.chat(numbers, max_tokens=3000, ignore_eos=True, stream=True)
        host, port = self.server.address.rsplit(":", 1)
        with socket.create_connection((host.strip("[]"), int(port)), timeout=STALL) as stream:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            text = json.dumps(body)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.server.key}\r\n"
            stream.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            self.ending.wait(numbers.uniform(0.5, 3))

    def malformed(self, numbers):
        chat = "/v1/chat/completions"
        _, good = self.chat(numbers)
        method, path, body, status = numbers.choice(
            [
                ("POST", chat, b"{", 400),
                ("POST", chat, b"\xff\xfe" * 100, 400),
                ("POST", chat, b"[" * 5000, 400),
                ("POST", chat, {**good, "temperature": "hot"}, 400),
                ("POST", chat, {**good, "messages": [{"role": "user", "content": 3}]}, 400),
                ("POST", chat, {**good, "model": "none"}, 404),
                ("POST", chat, {**good, "max_tokens": -1}, 400),
                ("POST", chat, {**good, "guided_regex": "(" * 50}, 400),
                ("POST", "/v1/completions", {"model": "builtin", "prompt": [1 << 40]}, 400),
                ("POST", "/v1/completions", {"model": "builtin", "prompt": "fox " * 9000}, 400),
                ("POST", "/v1/messages", {**good, "max_tokens": "many"}, 400),
                ("POST", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/"}, 403),
                ("GET", chat, None, 405),
                ("GET", "/v1/none", None, 404),
            ]
        )
        self.server.ask(method, path, body, expect=status)
        self.server.ask("POST", chat, good, key="sk-no-such-key-here", expect=401)

    def looked_at(self, _):
        models = self.server.ask("GET", "/v1/models")
        if models["data"][0]["id"] != "builtin":
            raise Wrong(f"models: {models}")
        if "sterna_requests_total" not in self.server.ask("GET", "/metrics"):
            raise Wrong("metrics: expected sterna_requests_total")
        self.server.ask("GET", "/health")

    def groups(self, *layers):
        return [f"layer.{layer}" for layer in layers]

    def swap(self, revision, groups):
        """Replaces groups of the second model by those of a revision: those given, or all that differ."""
        body = {"model": self.tale, "revision": self.server.revisions[revision]}
        if groups:
            body["groups"] = groups
        answer = self.server.ask("POST", "/v1/models/swap", body, key=self.server.admin)
        other = [layer in REVISIONS[revision] for layer in LAYERS]
        meant = [not groups or f"layer.{layer}" in groups for layer in LAYERS]
        expected = groups or [f"layer.{layer}" for layer, a, b in zip(LAYERS, self.state, other) if a != b]
        self.state = tuple(b if is_meant else a for a, b, is_meant in zip(self.state, other, meant))
        if sorted(one["group"] for one in answer["swapped"]) != sorted(expected):
            raise Wrong(f"swap: expected {expected}, found {answer['swapped']}")

    def tale_of(self, seed, n):
        messages = [{"role": "user", "content": "Tell me a story about a fox."}]
        return {"model": self.tale, "messages": messages, "seed": seed, "max_tokens": n, "ignore_eos": True}

    def tell(self, seed, n):
        return self.server.ask("POST", "/v1/chat/completions", self.tale_of(seed, n))["choices"][0]["message"]["content"]

    def of_one_revision(self, numbers):
        """An answer has the weights that it began with, to its end."""
        seed = numbers.randrange(2)
        text, _ = self.read(self.tale_of(seed, 40))
        if all(text != texts[seed] for texts in self.tales.values()):
            raise Wrong(f"swaps: expected an answer of one revision, found {text!r}")

    def groups_are_swapped(self, numbers):
        begun, seed = time.monotonic(), numbers.randrange(2)
        # What begins before ends as it would have.
        _, _, data = connection = self.events(self.tale_of(seed, 40))
        first, before = next(data), self.tales[self.state][seed]
        choices = [(revision, None) for revision in range(3) if self.state != tuple(layer in REVISIONS[revision] for layer in LAYERS)]
        choices += [(revision, self.groups(LAYERS[0])) for revision in range(3)]
        self.swap(*numbers.choice(choices))
        after = self.tell(seed, 40)
        deltas = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in [first, *data] if event != b"[DONE]"]
        connection[1].close()
        connection[0].close()
        if "".join(deltas) != before:
            raise Wrong(f"swaps: expected the answer to end as {before!r}, found {''.join(deltas)!r}")
        if after != self.tales[self.state][seed]:
            raise Wrong(f"swaps: expected the answer of {self.state}, found {after!r}")
        self.ending.wait(max(0.0, begun + EVERY - time.monotonic()))

    def models_come_and_go(self, numbers):
        begun = time.monotonic()
        # Twice: the second time it is there.
        for _ in range(2):
            model = self.server.ask("POST", "/v1/models/load", {"model": self.server.visitor}, key=self.server.admin)
            if model["status"]["value"] != "loaded":
                raise Wrong(f"models: expected one that is loaded, found {model}")
        what, body = self.chat(numbers, max_tokens=16)
        body["model"] = model["id"]
        _, _, data = connection = self.events({**body, "max_tokens": 300, "ignore_eos": True})
        next(data)
        answer = self.server.ask("POST", "/v1/chat/completions", body)
        self.same(("short", *what), answer["choices"][0]["message"]["content"])
        self.server.ask("POST", "/v1/models/unload", {"model": model["id"]}, key=self.server.admin)
        if list(data)[-1:] != [b"[DONE]"]:
            raise Wrong("models: an answer broke off when its model was unloaded")
        connection[1].close()
        connection[0].close()
        self.ending.wait(max(0.0, begun + EVERY - time.monotonic()))

    def adapters_come_and_go(self, numbers):
        begun = time.monotonic()
        index = numbers.randrange(len(self.adapters))
        name = f"a{index}"
        load = {"lora_name": name, "lora_path": str(self.adapters[index])}
        self.server.ask("POST", "/v1/load_lora_adapter", load, key=self.server.admin)
        seed = numbers.randrange(2)
        body = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 24, "seed": seed}
        body["model"] = f"builtin:{name}"
        # What begins with an adapter ends with it.
        _, _, data = connection = self.events({**body, "max_tokens": 400})
        next(data)
        answer = self.server.ask("POST", "/v1/chat/completions", body)
        self.same((name, seed), answer["choices"][0]["message"]["content"])
        self.server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, key=self.server.admin)
        if list(data)[-1:] != [b"[DONE]"]:
            raise Wrong(f"{name}: its answer broke off when it was unloaded")
        connection[1].close()
        connection[0].close()
        self.server.ask("POST", "/v1/chat/completions", body, expect=404)
        self.ending.wait(max(0.0, begun + EVERY - time.monotonic()))

    def work(self, index, kinds):
        numbers = random.Random(self.seed * 1000 + index)
        while not self.ending.is_set():
            (kind,) = numbers.choices(list(kinds), list(kinds.values()))
            try:
                kind(numbers)
                outcome = "ok"
            except Exception as error:  # Whatever it is, it is what is looked for.
                outcome = "FAILED"
                with self.lock:
                    self.failures.append(f"{kind.__name__}: {type(error).__name__}: {error}")
                if self.server.process.poll() is not None:
                    return
            with self.lock:
                self.outcomes[kind.__name__, outcome] += 1
            if self.pause and kind not in self.operators:
                self.ending.wait(numbers.uniform(0, 2 * self.pause))


def share(values, q):
    values = sorted(values)
    return values[min(len(values) - 1, int(q * len(values)))]


def slope(samples):
    """Bytes per second, by least squares."""
    n = len(samples)
    mean_x, mean_y = sum(x for x, _ in samples) / n, sum(y for _, y in samples) / n
    below = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / below if below else 0.0


def idle(server):
    """Waits until nothing is computed; what is left over else."""
    left = []
    for _ in range(300):
        lines = server.ask("GET", "/metrics").splitlines()
        now = [line for line in lines if line.startswith(("sterna_requests_running{", "sterna_requests_waiting "))]
        left = [line for line in now if not line.endswith(" 0")]
        if len(now) < 2:
            return [f"metrics: expected what runs and what waits, found {now}"]
        if not left:
            return []
        time.sleep(0.1)
    return [f"left over at the end: {line}" for line in left]


def ends_well(server, load):
    """SIGTERM: what is answered ends, nothing more is taken, and the program says that all went well."""
    connection, response, data = load.events({"model": "builtin", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1500, "ignore_eos": True})
    next(data)
    server.process.send_signal(signal.SIGTERM)
    failures = []
    if list(data)[-1:] != [b"[DONE]"]:
        failures.append("SIGTERM: an answer broke off")
    response.close()
    connection.close()
    try:
        code = server.process.wait(60)
    except subprocess.TimeoutExpired:
        return [*failures, "SIGTERM: the server did not end in 60 s"]
    return failures if code == 0 else [*failures, f"SIGTERM: expected status 0, found {code}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = pathlib.Path(__file__).resolve().parent.parent
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--pause", type=float, default=0, help="seconds between requests of a worker, on average")
    parser.add_argument("--program", default=os.environ.get("STERNA", str(root / "target/release/sterna")))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", metavar="KIND", help="a kind of request, of those that are printed at the end; may be given several times")
    parser.add_argument("--json", help="file for the results")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sterna-soak-") as scratch:
        scratch = pathlib.Path(scratch)
        server = Server(flags.program, scratch)
        try:
            load = Load(server, scratch, flags.seed, flags.pause)
            if flags.only:
                known = {kind.__name__: kind for kind in [*load.kinds, *load.operators]}
                unknown = [name for name in flags.only if name not in known]
                if unknown:
                    parser.error(f"--only: expected one of {', '.join(known)}, found {unknown[0]}")
                meant = [known[name] for name in flags.only]
                load.operators = [kind for kind in meant if kind in load.operators]
                load.kinds = {kind: 1 for kind in meant if kind not in load.operators}
            sys.exit(soak(flags, server, load))
        finally:
            server.close()


def soak(flags, server, load):
    kinds = load.kinds
    threads = [threading.Thread(target=load.work, args=(i, kinds), daemon=True) for i in range(flags.workers) if kinds]
    for i, operator in enumerate(load.operators):
        threads.append(threading.Thread(target=load.work, args=(-1 - i, {operator: 1}), daemon=True))
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    samples, shown = [], 0.0
    while (at := time.monotonic() - begun) < flags.seconds and server.process.poll() is None:
        memory = server.memory()
        if memory is not None:
            samples.append((at, memory))
            if at >= shown:
                shown += max(5, flags.seconds / 20)
                with load.lock:
                    n = sum(load.outcomes.values())
                print(f"{at:6.0f} s  {memory / 2**20:7.1f} MiB  {n:7} requests  {len(load.failures)} failures", flush=True)
        time.sleep(min(1.0, flags.seconds / 30))
    load.ending.set()
    for thread in threads:
        thread.join(2 * STALL)
    failures = load.failures
    failures += [f"{thread.name} hangs" for thread in threads if thread.is_alive()]
    if server.process.poll() is not None:
        failures.append(f"the server ended with status {server.process.poll()}: {server.said()[-500:]}")
    else:
        failures += idle(server)
        failures += ends_well(server, load)
    if "panicked" in server.said():
        failures.append("a thread panicked; the log says where")

    kinds = sorted({kind for kind, _ in load.outcomes})
    print(f"\n{'kind':22} {'ok':>8} {'failed':>8}")
    for kind in kinds:
        print(f"{kind:22} {load.outcomes[kind, 'ok']:8} {load.outcomes[kind, 'FAILED']:8}")
    result = {
        "seconds": round(time.monotonic() - begun, 1),
        "workers": flags.workers,
        "requests": {kind: load.outcomes[kind, "ok"] for kind in kinds},
        "failed": {kind: load.outcomes[kind, "FAILED"] for kind in kinds},
    }
    for name, values in (("first_token_ms", load.first), ("between_tokens_ms", load.between)):
        if not values:
            continue
        result[name] = {"p50": round(1e3 * share(values, 0.5), 2), "p99": round(1e3 * share(values, 0.99), 2), "n": len(values)}
        print("{}: p50 {p50}, p99 {p99} (n = {n})".format(name, **result[name]))
    # The first third fills caches and what allocators keep.
    judged = [sample for sample in samples if sample[0] >= flags.seconds / 3]
    if len(judged) >= 10:
        per_second = slope(judged)
        grown = per_second * (judged[-1][0] - judged[0][0])
        limit = max(GROWTH, GROWTH_SHARE * judged[0][1])
        result["memory_mib"] = {
            "first": round(samples[0][1] / 2**20, 1), "judged_from": round(judged[0][1] / 2**20, 1),
            "last": round(judged[-1][1] / 2**20, 1), "most": round(max(m for _, m in samples) / 2**20, 1),
            "kib_per_second": round(per_second / 1024, 2),
        }
        print("memory: {first} MiB at first, {judged_from} after a third, {last} at last, {most} at most; slope {kib_per_second} KiB/s".format(**result["memory_mib"]))
        if grown > limit:
            failures.append(f"memory grew by {grown / 2**20:.1f} MiB; expected at most {limit / 2**20:.1f}")
    else:
        print("memory: not judged, for it can't be read here, or the run was too short")
    for failure in failures[:20]:
        print(f"FAILED  {failure}")
    if len(failures) > 20:
        print(f"FAILED  and {len(failures) - 20} more")
    result["failures"] = len(failures)
    if flags.json:
        pathlib.Path(flags.json).write_text(json.dumps(result, indent=1) + "\n")
    print("ok" if not failures else f"{len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    main()
