"""What the tests share: engines on the stand-in, and a check that nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import threading
import unittest
import warnings
from typing import Any

from sterna import Engine, Form

from . import stand_in

STAND_IN = [sys.executable, stand_in.__file__]


class EngineTest(unittest.TestCase):
    """A test with a model folder for the stand-in.

    A process, thread or pipe that is left when it ends fails it: an unclosed pipe or a process that
    was not waited for is a ``ResourceWarning``, which is an error here wherever it is raised.
    """

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory(prefix="sterna-test-")
        self.addCleanup(folder.cleanup)
        self.model = folder.name
        self._engines: list[Engine] = []
        self._n_threads = threading.active_count()
        self._unraisable: list[Any] = []
        hook = sys.unraisablehook
        self.addCleanup(setattr, sys, "unraisablehook", hook)
        sys.unraisablehook = self._unraisable.append
        caught = warnings.catch_warnings()
        caught.__enter__()
        self.addCleanup(caught.__exit__, None, None, None)
        warnings.simplefilter("error")

    def tearDown(self) -> None:
        for engine in self._engines:
            engine.close()
        gc.collect()
        self.assertEqual([str(left.exc_value) for left in self._unraisable], [])
        self.assertEqual(threading.active_count(), self._n_threads, threading.enumerate())

    def engine(self, *behaviour: str, **options: Any) -> Engine:
        """An engine whose stand-in has the given behaviours, closed with the test."""
        self.behave(*behaviour)
        engine = Engine(self.model, program=STAND_IN, **options)
        self._engines.append(engine)
        return engine

    def behave(self, *behaviour: str) -> None:
        with open(os.path.join(self.model, "behaviour"), "w", encoding="utf-8") as file:
            file.write(" ".join(behaviour))

    def read_by_worker(self) -> str:
        """All that workers have read."""
        with open(os.path.join(self.model, "read"), "rb") as file:
            return file.read().decode()

    def requests_read(self) -> list[dict[str, str]]:
        """The blocks that workers have read, without those that opened them."""
        lines = iter(self.read_by_worker().splitlines())
        blocks = []
        for count in lines:
            pairs = (next(lines).partition("=") for _ in range(int(count)))
            blocks.append({key: value for key, _, value in pairs})
        return [block for block in blocks if "tokens" in block]

    def arguments(self) -> list[list[str]]:
        """The arguments of all runs of the program."""
        with open(os.path.join(self.model, "arguments"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]


BOTH_FORMS = (Form.KEY_VALUE, Form.V1)
