#!/usr/bin/env python3
"""Drives the Python SDK on our programs through all that it does with text models.

    scripts/sdk-with-sterna.py sdk --sterna target/release/sterna
    sdk-env/bin/python scripts/sdk-trial.py sdk

The Python that runs it needs what `sdk/requirements.txt` lists. The SDK's store is a folder of this run
alone. Prints a line for each capability, and exits with 1 if one fails. The models are those of
`testdata`: the first (BitNet, packed) is asked questions, and the second (Llama, in widths that the
quantizer must pad) is swapped in.
"""

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
GREEDY = {"temperature": 0.0, "top_k": 1, "top_p": 1.0, "repetition_penalty": 1.0}
QUESTIONS = ("Once upon a time there was a cat", "What did the cat see", "And then")
MAX_TOKENS = 24
# The SDK waits for a token for 5 s after the first.
SECONDS_FOR_A_TOKEN = 5.0


class Failed(Exception):
    """A capability that isn't there."""


def expect(holds, message):
    if not holds:
        raise Failed(message)


class Trial:
    """The models, the store and the count of failures."""

    def __init__(self, sdk, work, model, second):
        self.sdk, self.n_failed, self.n_passed = sdk, 0, 0
        self.home = work / "home"
        self.home.mkdir()
        self.env = {
            **os.environ,
            "HOME": str(self.home),
            "USERPROFILE": str(self.home),
            "PYTHONPATH": str(sdk),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        self.model = copy_model(model, work / "first", TEMPLATE)
        self.second = copy_model(second, work / "second", None)
        self.adapter = write_adapter(self.model, work / "style")
        self.store = self.home / ".trillim" / "models" / "Local"

    def check(self, name, capability):
        """Runs `capability`, which returns what is worth saying, and prints how it went."""
        start = time.monotonic()
        try:
            said = capability()
        except Exception as error:
            self.n_failed += 1
            print(f"FAIL  {name}: {type(error).__name__}: {error}", flush=True)
            if not isinstance(error, Failed):
                traceback.print_exc()
        else:
            self.n_passed += 1
            seconds = time.monotonic() - start
            print(f"pass  {name} ({seconds:.2f} s{f'; {said}' if said else ''})", flush=True)

    def command(self, *arguments):
        """What a run of the SDK's command prints."""
        command = [sys.executable, "-m", "trillim.cli", *map(str, arguments)]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=300)
        expect(done.returncode == 0, f"exit code {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    # On the command line.

    def quantize_model(self, source):
        self.command("quantize", source)
        bundle = self.store / f"{source.name}-TRNQ"
        check_header(bundle / "qmodel.tensors", b"TRLM", 16)
        check_header(bundle / "rope.cache", b"TRRC", 12)
        left = sorted(path.name for path in bundle.iterdir() if path.suffix in (".tmp", ".bin"))
        expect(not left, f"left in the bundle: {left}")
        return f"{(bundle / 'qmodel.tensors').stat().st_size} bytes"

    def quantize_adapter(self):
        self.command("quantize", self.model, self.adapter)
        bundle = self.store / "style-TRNQ"
        check_header(bundle / "qmodel.lora", b"TRLA", 12)
        left = sorted(path.name for path in bundle.iterdir() if path.name.startswith(".unused"))
        expect(not left, f"left in the bundle: {left}")
        return f"{(bundle / 'qmodel.lora').stat().st_size} bytes"

    def list_bundles(self):
        printed = self.command("list")
        for name in ("first-TRNQ", "second-TRNQ", "style-TRNQ"):
            expect(f"Local/{name}" in printed, f"no {name} in:\n{printed}")

    def doctor(self):
        printed = self.command("doctor")
        for name in ("trillim-inference", "trillim-quantize"):
            line = next((line for line in printed.splitlines() if name in line), "")
            expect("ready" in line, f"{name}: {line!r}")

    # In this process.

    def import_sdk(self):
        os.environ.update(self.env)
        sys.path.insert(0, str(self.sdk))
        import trillim

        expect(pathlib.Path(trillim.__file__).is_relative_to(self.sdk), trillim.__file__)
        return f"Python {sys.version.split()[0]}"

    @contextlib.contextmanager
    def running(self, **options):
        """The SDK's model component on the first model, started."""
        from trillim import LLM, Runtime

        with Runtime(LLM("Local/first-TRNQ", **options)) as runtime:
            yield runtime.llm

    def chat(self):
        """Several turns: the answers must not depend on what is cached."""
        with self.running() as llm:
            answers, usage = converse(llm)
            # The cache holds this conversation: its first turn goes back into it.
            again, _ = converse(llm)
            expect(again == answers, f"with a cache that goes further: {again}, not {answers}")
        with self.running() as llm:
            anew, _ = converse(llm)
        expect(anew == answers, f"from another process: {anew}, not {answers}")
        expect(len(set(answers)) > 1 and all(answers), f"answers: {answers}")
        expect(usage.cached_tokens > 0, f"cached tokens: {usage}")
        self.answers = answers
        return f"{usage.cached_tokens} of {usage.total_tokens} tokens cached; {answers[0][:40]!r}"

    def limits(self):
        """The token limit, and the end of the context, both end an answer properly."""
        with self.running() as llm:
            session = llm.open_session()
            events = list(session.generate(QUESTIONS[0], max_tokens=1, **GREEDY))
            one = events[-1].usage.completion_tokens
            # What the model said, and the id that ends it.
            expect(one in (1, 2), f"max_tokens 1: {one} tokens")
            session = llm.open_session()
            events = list(session.generate("the cat sat on the mat. " * 10, max_tokens=0, **GREEDY))
            usage = events[-1].usage
            expect(usage.completion_tokens > 0, f"{usage}")
        return f"max_tokens 1: {one} tokens; without a limit: {usage.total_tokens} in all"

    def streaming(self):
        with self.running() as llm:
            session = llm.open_session()
            times, pieces, done = [], [], None
            for event in session.generate(QUESTIONS[0], max_tokens=MAX_TOKENS, **GREEDY):
                if event.type == "token":
                    times.append(time.monotonic())
                    pieces.append(event.text)
                elif event.type == "done":
                    done = event
        expect(done is not None and done.text == "".join(pieces), f"{done} of {pieces}")
        expect(done.text == self.answers[0], f"{done.text!r}, not {self.answers[0]!r}")
        expect(len(set(times)) > 1, f"{len(pieces)} pieces at {len(set(times))} times")
        return f"{len(pieces)} pieces in {times[-1] - times[0]:.3f} s"

    def stop(self):
        """An answer that is stopped ends its process; the next one is right, and comes soon."""
        with self.running() as llm:
            before = children()
            for _ in range(3):
                answer = llm.open_session().generate(QUESTIONS[1], max_tokens=0, **GREEDY)
                next(answer)
                answer.close()
                start = time.monotonic()
                text = llm.open_session().collect(QUESTIONS[0], max_tokens=MAX_TOKENS, **GREEDY)
                seconds = time.monotonic() - start
                expect(text == self.answers[0], f"after a stop: {text!r}, not {self.answers[0]!r}")
            after = children()
        if before is not None:
            expect(before != after and len(after) == len(before), f"processes: {before}, then {after}")
        return f"next answer after {seconds:.2f} s"

    def lora(self):
        with self.running(lora_dir="Local/style-TRNQ") as llm:
            styled, _ = converse(llm)
            again, _ = converse(llm)
        expect(styled == again, f"{again}, not {styled}")
        expect(styled != self.answers, "the adapter changes nothing")
        self.styled = styled
        return f"{styled[0][:40]!r}"

    def options(self):
        """What the SDK passes on when asked to: threads, and types for the adapter and the output head."""
        with self.running(
            num_threads=1, lora_dir="Local/style-TRNQ", lora_quant="q8_0", unembed_quant="q8_0"
        ) as llm:
            return repr(llm.open_session().collect(QUESTIONS[0], max_tokens=8, **GREEDY))

    # Over HTTP.

    @contextlib.contextmanager
    def serving(self):
        """The port of the SDK's server, which may swap models."""
        import uvicorn
        from trillim import LLM, Server

        app = Server(LLM("Local/first-TRNQ", allow_hot_swap=True)).app
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not (server.started and server.servers):
                expect(thread.is_alive(), "the server has ended")
                time.sleep(0.01)
            yield server.servers[0].sockets[0].getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(60)

    def http(self):
        with self.serving() as port:
            self.check("HTTP: health", lambda: self.http_get(port, "/healthz", {"status": "ok"}))
            self.check("HTTP: models", lambda: self.http_models(port, "first-TRNQ"))
            self.check("HTTP: chat", lambda: self.http_chat(port))
            self.check("HTTP: streaming", lambda: self.http_stream(port))
            self.check("HTTP: a client that goes away", lambda: self.http_hang_up(port))
            self.check("HTTP: swap to an adapter", lambda: self.http_swap_to_adapter(port))
            self.check("HTTP: swap to another model", lambda: self.http_swap(port))

    def http_get(self, port, path, expected):
        found = request(port, "GET", path)
        expect(found == expected, f"{found}")

    def http_models(self, port, name):
        models = [model["id"] for model in request(port, "GET", "/v1/models")["data"]]
        expect(models == [name], f"{models}")

    def http_chat(self, port):
        messages = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            body = {"messages": messages, "max_tokens": MAX_TOKENS, **GREEDY}
            text = request(port, "POST", "/v1/chat/completions", body)["choices"][0]["message"]["content"]
            # The same request again: all of its prompt is cached.
            again = request(port, "POST", "/v1/chat/completions", body)
            expect(again["choices"][0]["message"]["content"] == text, f"{again}, not {text!r}")
            messages.append({"role": "assistant", "content": text or " "})
        first = messages[1]["content"]
        expect(first == self.answers[0], f"{first!r}, not {self.answers[0]!r}")
        return f"usage of the last: {again['usage']}"

    def http_stream(self, port):
        body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "stream": True}
        chunks = list(stream(port, {**body, "max_tokens": MAX_TOKENS, **GREEDY}))
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        expect(text == self.answers[0], f"{text!r}, not {self.answers[0]!r}")
        return f"{len(chunks)} chunks"

    def http_hang_up(self, port):
        body = {"messages": [{"role": "user", "content": QUESTIONS[1]}], "stream": True, **GREEDY}
        chunks = stream(port, body)
        next(chunks), next(chunks)
        chunks.close()
        start = time.monotonic()
        body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": MAX_TOKENS, **GREEDY}
        n_failed = 0
        while True:
            try:
                reply = request(port, "POST", "/v1/chat/completions", body)
                break
            except Refused as refused:
                # One request at a time; the server notices within a token that its client has gone.
                # Its clean-up is cut short as it ends the process, so the SDK starts the next one
                # only when a request has failed for want of it.
                n_failed += refused.status == 503
                expect(refused.status == 429 or n_failed == 1, f"{refused}")
                expect(time.monotonic() - start < 2 * SECONDS_FOR_A_TOKEN, "still busy")
                time.sleep(0.01)
        text = reply["choices"][0]["message"]["content"]
        expect(text == self.answers[0], f"{text!r}, not {self.answers[0]!r}")
        return f"next answer after {time.monotonic() - start:.2f} s"

    def http_swap_to_adapter(self, port):
        self.swap(port, {"model_dir": "Local/first-TRNQ", "lora_dir": "Local/style-TRNQ"}, "first-TRNQ")
        body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": MAX_TOKENS, **GREEDY}
        text = request(port, "POST", "/v1/chat/completions", body)["choices"][0]["message"]["content"]
        expect(text == self.styled[0], f"{text!r}, not {self.styled[0]!r}")

    def http_swap(self, port):
        self.swap(port, {"model_dir": "Local/second-TRNQ"}, "second-TRNQ")
        body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 8, **GREEDY}
        usage = request(port, "POST", "/v1/chat/completions", body)["usage"]
        expect(usage["completion_tokens"] > 0, f"{usage}")

    def swap(self, port, body, name):
        found = request(port, "POST", "/v1/models/swap", body)
        expect(found == {"object": "model.swap", "model": name}, f"{found}")
        self.http_models(port, name)

    def leftovers(self):
        left = children()
        expect(not left, f"processes: {left}")
        return "not looked for on this system" if left is None else ""


def copy_model(source, target, template):
    """A copy of a model folder, to which a chat template may be given."""
    shutil.copytree(source, target)
    if template is not None:
        path = target / "tokenizer_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps({**config, "chat_template": template}), encoding="utf-8")
    return target


def write_adapter(model, target, rank=4):
    """An adapter of random numbers for all linear layers, as PEFT saves it."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    n_layers, model_dim, ffn_dim, n_heads, n_kv_heads = (
        config[key]
        for key in (
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
        )
    )
    head_dim = config.get("head_dim", model_dim // n_heads)
    q_dim, kv_dim = n_heads * head_dim, n_kv_heads * head_dim
    shapes = {
        "self_attn.q_proj": (q_dim, model_dim),
        "self_attn.k_proj": (kv_dim, model_dim),
        "self_attn.v_proj": (kv_dim, model_dim),
        "self_attn.o_proj": (model_dim, q_dim),
        "mlp.gate_proj": (ffn_dim, model_dim),
        "mlp.up_proj": (ffn_dim, model_dim),
        "mlp.down_proj": (model_dim, ffn_dim),
    }
    draw = random.Random(1)
    header, data = {}, bytearray()
    for layer in range(n_layers):
        for name, (n_out, n_in) in shapes.items():
            # Of a size that changes what the model says, and leaves it a model.
            for part, shape, size in (("A", (rank, n_in), 1.0), ("B", (n_out, rank), 0.5)):
                n = shape[0] * shape[1]
                start = len(data)
                data += struct.pack(f"<{n}f", *(draw.gauss(0, size * shape[1] ** -0.5) for _ in range(n)))
                header[f"base_model.model.model.layers.{layer}.{name}.lora_{part}.weight"] = {
                    "dtype": "F32",
                    "shape": shape,
                    "data_offsets": [start, len(data)],
                }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    target.mkdir()
    (target / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    adapter = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": [name.split(".")[1] for name in shapes],
        "base_model_name_or_path": model.name,
    }
    (target / "adapter_config.json").write_text(json.dumps(adapter), encoding="utf-8")
    return target


def check_header(path, magic, size):
    with open(path, "rb") as file:
        header = file.read(size)
    expect(len(header) == size, f"{path.name}: {len(header)} bytes")
    version = struct.unpack_from("<I", header, 4)[0]
    expect(header[:4] == magic and version == 1, f"{path.name}: begins with {header!r}")


def converse(llm):
    """The answers of a conversation of several turns, and the usage of the last."""
    session, answers = llm.open_session(), []
    for question in QUESTIONS:
        *_, done = session.generate(question, max_tokens=MAX_TOKENS, **GREEDY)
        answers.append(done.text)
    return answers, done.usage


class Refused(Exception):
    """An answer of the server that isn't success."""

    def __init__(self, status, text):
        super().__init__(f"status {status}: {text}")
        self.status = status


def request(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        reply = connection.getresponse()
        text = reply.read().decode()
    finally:
        connection.close()
    if reply.status != 200:
        raise Refused(reply.status, text)
    return json.loads(text)


def stream(port, body):
    """The chunks of a streamed answer; closing it closes the connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        reply = connection.getresponse()
        expect(reply.status == 200, f"status {reply.status}")
        while line := reply.readline():
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                return
            if data:
                chunk = json.loads(data)
                expect("error" not in chunk, f"{chunk}")
                yield chunk
        raise Failed("the stream ended without [DONE]")
    finally:
        connection.close()


def children():
    """The processes that this one has started and that run, where the system says so; else `None`."""
    if not pathlib.Path("/proc/self/stat").exists():
        return None
    found = set()
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may hold anything.
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid():
                found.add(int(path.parent.name))
    return found


def main():
    parser = argparse.ArgumentParser(description="Drives the Python SDK on our programs.")
    parser.add_argument("sdk", type=pathlib.Path, help="folder that sdk-with-sterna.py has written")
    testdata = ROOT / "testdata"
    parser.add_argument("--model", type=pathlib.Path, default=testdata / "bitllama-3M" / "hf-packed")
    parser.add_argument("--second", type=pathlib.Path, default=testdata / "stories260K" / "hf")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="sdk-trial-") as work:
        trial = Trial(args.sdk.resolve(), pathlib.Path(work), args.model, args.second)
        trial.check("quantize a model", lambda: trial.quantize_model(trial.model))
        trial.check("quantize a model with padding", lambda: trial.quantize_model(trial.second))
        trial.check("quantize an adapter", trial.quantize_adapter)
        trial.check("list", trial.list_bundles)
        trial.check("doctor", trial.doctor)
        trial.check("import", trial.import_sdk)
        trial.check("chat of several turns, with its prefix reused", trial.chat)
        trial.check("limits", trial.limits)
        trial.check("streaming", trial.streaming)
        trial.check("stop", trial.stop)
        trial.check("adapter", trial.lora)
        trial.check("options of the engine", trial.options)
        trial.check("HTTP server", trial.http)
        trial.check("nothing left", trial.leftovers)
    print(f"{trial.n_passed} passed, {trial.n_failed} failed")
    return 1 if trial.n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
