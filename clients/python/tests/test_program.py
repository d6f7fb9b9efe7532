"""The real program, if ``STERNA_PROGRAM`` says where it is."""

from __future__ import annotations

import gc
import os
import pathlib
import tempfile
import threading
import unittest
from unittest import mock

from sterna import GREEDY, Engine, Form

PROGRAM = os.environ.get("STERNA_PROGRAM", "")


@unittest.skipUnless(PROGRAM, "STERNA_PROGRAM names no program")
class ProgramTest(unittest.TestCase):
    def test_both_forms_agree_with_each_other_and_with_themselves(self) -> None:
        answers = []
        for form in (Form.KEY_VALUE, Form.V1):
            with Engine("builtin", program=PROGRAM, form=form) as engine:
                prompt = engine.encode("Once upon a time")
                whole = engine.generate(prompt, sampling=GREEDY, max_tokens=24)
                self.assertEqual(len(whole), 24)
                for n_first in (0, 1, 12, 23):
                    # From the cache, or back in it, or anew after a cancelled answer.
                    rest = engine.generate(prompt + whole[:n_first], sampling=GREEDY, max_tokens=24 - n_first)
                    self.assertEqual(whole[:n_first] + rest, whole)
                with engine.stream(prompt, sampling=GREEDY) as stream:
                    self.assertEqual(next(stream), whole[0])
                self.assertEqual(engine.generate(prompt, sampling=GREEDY, max_tokens=24), whole)
                answers.append(whole)
        self.assertEqual(answers[0], answers[1])

    def test_a_seed_repeats_an_answer(self) -> None:
        def draw(seed: int) -> list[int]:
            with Engine("builtin", program=PROGRAM, seed=seed) as engine:
                return engine.generate(engine.encode("Once"), max_tokens=16)

        self.assertEqual(draw(1), draw(1))
        self.assertNotEqual(draw(1), draw(2))

    def test_a_thousand_stops_leave_nothing(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        temporary = mock.patch.dict(os.environ, TMPDIR=folder.name)
        with temporary, Engine("builtin", program=PROGRAM) as engine:
            prompt = engine.encode("Once upon a time")
            for _ in range(5):
                next(engine.stream(prompt))
            before = self.left()
            for _ in range(1000):
                # Dropped at once, and so stopped.
                next(engine.stream(prompt))
            self.assertEqual(self.left(), before)
            self.assertGreater(len(engine.generate(prompt, max_tokens=8)), 0)

    def left(self) -> tuple[object, ...]:
        """What could be left behind, as far as this system shows it."""
        gc.collect()
        folders = map(pathlib.Path, ("/proc/self/fd", "/dev/shm", os.environ["TMPDIR"]))
        files = [len(list(folder.iterdir())) if folder.exists() else 0 for folder in folders]
        children = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/children")]
        return (threading.active_count(), sorted(children), *files)
