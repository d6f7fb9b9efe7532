"""Workers that fail, stop or talk nonsense: one clear error, and the next answer is right."""

from __future__ import annotations

import signal
import sys
import time
import unittest

from sterna import Engine, EngineError, EngineTimeout, Form, ProtocolError

from .stand_in import answer
from .support import BOTH_FORMS, STAND_IN, EngineTest


class FailureTest(EngineTest):
    def fails(self, behaviour: str, kind: type[EngineError], says: str, **options: object) -> EngineError:
        """The error of an answer; after it, the same engine must answer."""
        engine = self.engine(behaviour, **options)
        with self.assertRaisesRegex(kind, says) as caught:
            engine.generate([20])
        self.behave()
        self.assertEqual(engine.generate([20]), answer([20]))
        return caught.exception

    def test_a_crash_gives_its_reason_and_code(self) -> None:
        for form in BOTH_FORMS:
            with self.subTest(form=form):
                error = self.fails("crash", EngineError, r"exit code 3\): worker: out of memory", form=form)
                self.assertEqual((error.exit_code, error.stderr), (3, "worker: out of memory"))

    @unittest.skipIf(sys.platform == "win32", "signals")
    def test_a_worker_that_was_killed(self) -> None:
        error = self.fails("killed", EngineError, r"ended before a token \(signal 6\)")
        self.assertEqual(error.exit_code, -signal.SIGABRT)

    def test_the_end_of_output_in_an_answer(self) -> None:
        self.assertEqual(self.fails("quits", EngineError, "ended before a token").exit_code, 0)
        self.assertEqual(self.fails("cut", EngineError, "ended before a token").exit_code, 0)

    def test_a_model_that_does_not_load(self) -> None:
        error = self.fails("fails-to-load", EngineError, "expected 24 tensors")
        self.assertEqual(error.exit_code, 3)

    def test_lines_that_are_no_tokens(self) -> None:
        self.fails("garbage", ProtocolError, "expected a token, found")
        self.fails("long-line", ProtocolError, "expected a token, found b'1111")
        self.fails("out-of-range", ProtocolError, "a token 100 is not from 0 to 99")

    def test_a_position_that_cannot_be(self) -> None:
        for form in BOTH_FORMS:
            with self.subTest(form=form):
                self.fails("bad-position", ProtocolError, "the KV position", form=form)
                self.fails("negative-position", ProtocolError, "the KV position -1", form=form)

    def test_more_tokens_than_were_asked_for(self) -> None:
        engine = self.engine("too-many", "endless")
        with self.assertRaisesRegex(ProtocolError, "expected the end of an answer of 3 tokens"):
            engine.generate([20], max_tokens=3)
        engine = self.engine("too-many", "endless", form=Form.V1)
        # Here the number after the last token can only be the position.
        with self.assertRaisesRegex(ProtocolError, "the KV position 11"):
            engine.generate([20], max_tokens=3)

    def test_a_worker_that_hangs(self) -> None:
        start = time.monotonic()
        self.fails("hangs", EngineTimeout, r"a token did not come within 0\.5 s", token_timeout=0.5)
        self.fails("deaf", EngineTimeout, "the first token did not come within 1 s", first_token_timeout=1)
        self.assertLess(time.monotonic() - start, 30)

    def test_a_prompt_that_nobody_reads(self) -> None:
        engine = self.engine("deaf", first_token_timeout=1)
        with self.assertRaises(TimeoutError):
            engine.generate([20] * 100_000)

    def test_a_worker_that_talks_before_it_listens(self) -> None:
        engine = self.engine("talks-first")
        # Neither side waits for the other, though neither pipe holds what is written.
        stream = engine.stream([21] * 100_000)
        self.assertEqual([next(stream) for _ in range(30_000)], [20] * 30_000)
        stream.cancel()

    def test_a_chatty_worker_is_not_held_up(self) -> None:
        engine = self.engine("noisy")
        self.assertEqual(engine.generate([20]), answer([20]))
        self.behave("noisy", "crash")
        engine.stream([20]).cancel()
        with self.assertRaises(EngineError) as caught:
            engine.generate([20])
        self.assertTrue(caught.exception.stderr.endswith("last words\nworker: out of memory"))
        self.assertLessEqual(len(caught.exception.stderr), 4096)

    def test_a_worker_that_ended_between_answers_is_replaced(self) -> None:
        engine = self.engine()
        self.assertEqual(engine.generate([20]), answer([20]))
        worker = engine._worker
        assert worker is not None
        worker._process.kill()
        worker._process.wait()
        self.assertEqual(engine.generate([20, 21]), answer([20, 21]))

    def test_a_program_that_is_not_there(self) -> None:
        with self.assertRaisesRegex(EngineError, "cannot start 'no-such-program-as-this'"):
            Engine(self.model, program="no-such-program-as-this")

    def test_a_model_that_is_not_there(self) -> None:
        with self.assertRaisesRegex(EngineError, r"exit code 3\): worker: nowhere: no such folder") as caught:
            Engine("nowhere", program=STAND_IN)
        self.assertEqual(caught.exception.exit_code, 3)

    def test_a_configuration_that_cannot_be_read(self) -> None:
        for behaviour in ("bad-config", "short-config"):
            with self.subTest(behaviour=behaviour), self.assertRaisesRegex(ProtocolError, "configuration"):
                self.engine(behaviour)

    def test_a_worker_of_another_version(self) -> None:
        with self.assertRaisesRegex(ProtocolError, "protocol version: expected 1, found '2'"):
            self.engine("other-version")

    def test_a_tokenizer_that_talks_nonsense(self) -> None:
        with self.assertRaisesRegex(ProtocolError, "no ids"):
            self.engine("garbage").encode("text")

    def test_many_workers_leave_nothing(self) -> None:
        engine = self.engine("endless")
        for _ in range(20):
            with engine.stream([20]) as stream:
                next(stream)
