"""Models by their text: the real program, if ``STERNA_PROGRAM`` says where it is."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from typing import Any

import sterna
from sterna import ray as jobs

PROGRAM = os.environ.get("STERNA_PROGRAM", "")
PROMPT = "Once upon a time"


class NoProgramTest(unittest.TestCase):
    def test_what_cannot_start_says_so(self) -> None:
        with self.assertRaisesRegex(sterna.EngineError, "cannot start '/nowhere/sterna'"):
            sterna.load("builtin", program="/nowhere/sterna")


@unittest.skipUnless(PROGRAM, "STERNA_PROGRAM names no program")
class ModelTest(unittest.TestCase):
    model: sterna.Model

    @classmethod
    def setUpClass(cls) -> None:
        cls.model = sterna.load("builtin", program=PROGRAM)
        cls.addClassCleanup(cls.model.close)

    def test_an_answer_is_the_same_whole_streamed_and_by_ids(self) -> None:
        asked = {"max_tokens": 24, "temperature": 0}
        whole = self.model.generate(PROMPT, **asked)
        self.assertEqual((whole.finish_reason, whole.completion_tokens), ("length", 24))
        self.assertEqual("".join(self.model.stream(PROMPT, **asked)), whole.text)
        ids = self.model.encode(PROMPT)
        again = self.model.generate(ids, **asked)
        self.assertEqual(again.text, whole.text)
        tale = self.model.generate(PROMPT + whole.text * 3, **asked)
        retold = self.model.generate(PROMPT + whole.text * 3, **asked)
        self.assertEqual(retold.text, tale.text)
        self.assertGreater(retold.cached_tokens, retold.prompt_tokens // 2)
        self.assertEqual(self.model.decode(self.model.encode(" a fox named Ruby")), " a fox named Ruby")

    def test_a_chat_streams_what_it_says(self) -> None:
        whole = self.model.chat("Tell me a story.", max_tokens=16, temperature=0)
        messages = [{"role": "user", "content": "Tell me a story."}]
        pieces = list(self.model.stream_chat(messages, max_tokens=16, temperature=0))
        self.assertGreater(len(pieces), 1)
        self.assertEqual("".join(pieces), whole.text)

    def test_a_batch_has_the_answers_of_each_alone_in_order(self) -> None:
        prompts = [f"{name} went to the" for name in ("Tom", "Lily", "Ben", "Mia", "Sam")]
        asked: dict[str, Any] = {"max_tokens": 12, "seed": 5, "temperature": 0.8}
        batch = self.model.batch(prompts, **asked)
        self.assertEqual([a.text for a in batch], [self.model.generate(p, **asked).text for p in prompts])

    def test_an_answer_keeps_to_a_schema(self) -> None:
        schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        answer = self.model.chat("A number?", response_format=wanted, max_tokens=60)
        self.assertRegex(answer.text, r'^\s*\{\s*"n"\s*:\s*[12]')

    def test_vectors_have_length_one(self) -> None:
        vectors = self.model.embed(["a fox", "a cat"], pooling="mean")
        self.assertEqual(len(vectors), 2)
        for vector in vectors:
            self.assertAlmostEqual(sum(x * x for x in vector), 1.0, places=4)
        with self.assertRaisesRegex(sterna.RequestError, "pooling") as refused:
            self.model.embed("a fox")
        self.assertEqual(refused.exception.status, 400)

    def test_what_is_refused_names_the_field(self) -> None:
        with self.assertRaisesRegex(sterna.RequestError, "expected a whole number") as refused:
            self.model.generate(PROMPT, max_tokens=-5)
        self.assertEqual((refused.exception.status, refused.exception.param), (400, "max_tokens"))

    def test_leaving_a_loop_ends_the_answer(self) -> None:
        for piece in self.model.stream(PROMPT, max_tokens=400):
            self.assertTrue(piece)
            break
        self.assertTrue(self.model.generate(PROMPT, max_tokens=2).text)

    def test_others_have_no_key(self) -> None:
        self.model._server.key, key = "wrong", self.model._server.key
        try:
            with self.assertRaises(sterna.RequestError) as refused:
                self.model.generate(PROMPT)
            self.assertEqual(refused.exception.status, 401)
        finally:
            self.model._server.key = key


@unittest.skipUnless(PROGRAM, "STERNA_PROGRAM names no program")
class EndTest(unittest.TestCase):
    def test_a_model_that_is_not_there_is_named(self) -> None:
        with self.assertRaisesRegex(sterna.EngineError, "no-such-model.gguf") as failed:
            sterna.load("no-such-model.gguf", program=PROGRAM)
        self.assertEqual(failed.exception.exit_code, 1)

    def test_a_server_that_is_killed_is_noticed(self) -> None:
        with sterna.load("builtin", program=PROGRAM) as model:
            model._server.process.kill()
            with self.assertRaises(sterna.EngineError):
                model.generate(PROMPT)

    def test_a_server_ends_with_its_owner_however_that_ends(self) -> None:
        own = (
            "import sterna, sys, time\n"
            "model = sterna.load('builtin', program=sys.argv[1])\n"
            "print(*model._server.address, flush=True)\n"
            "time.sleep(600)\n"
        )
        owner = subprocess.Popen([sys.executable, "-c", own, PROGRAM], stdout=subprocess.PIPE, text=True)
        with owner:
            assert owner.stdout is not None
            host, port = owner.stdout.readline().split()
            socket.create_connection((host, int(port)), timeout=60).close()
            owner.kill()
        end = time.monotonic() + 60
        # A port that nobody listens to.
        with self.assertRaises(ConnectionRefusedError):
            while time.monotonic() < end:
                socket.create_connection((host, int(port)), timeout=60).close()
                time.sleep(0.05)

    def test_nothing_is_left_behind(self) -> None:
        n_threads = threading.active_count()
        with sterna.load("builtin", program=PROGRAM) as model:
            model.batch([PROMPT] * 3, max_tokens=2)
        self.assertIsNotNone(model._server.process.returncode)
        self.assertEqual(threading.active_count(), n_threads)


class AnswersTest(unittest.TestCase):
    def test_answers_are_found_by_others_and_damage_costs_one(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name) / "answers"
            one, other = jobs.Answers(folder), jobs.Answers(folder)
            one.add({"a": "1", "b": "2\n2"})
            self.assertEqual(other.held(["a", "b", "c"]), {"a": "1", "b": "2\n2"})
            other.add({"c": "3"})
            with next(folder.glob("*.jsonl")).open("a") as file:
                file.write('nonsense\n{"key": "d", "ans')
            self.assertEqual(one.held(["a", "b", "c", "d"]), {"a": "1", "b": "2\n2", "c": "3"})
            self.assertEqual(jobs.Answers(folder).held(["c", "d"]), {"c": "3"})
            del one, other

    def test_what_was_asked_is_told_apart(self) -> None:
        asked = {"model": "m", "prompt": "a", "options": {"seed": 1, "max_tokens": 2}}
        again = {"options": {"max_tokens": 2, "seed": 1}, "prompt": "a", "model": "m"}
        self.assertEqual(jobs.digest(asked), jobs.digest(again))
        for other in ({"prompt": "b"}, {"model": "n"}, {"options": {"seed": 2, "max_tokens": 2}}):
            self.assertNotEqual(jobs.digest(asked), jobs.digest({**asked, **other}))
