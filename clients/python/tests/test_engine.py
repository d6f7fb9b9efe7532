"""Answers: right, in time, reusing what is cached, and cancelled."""

from __future__ import annotations

import asyncio
import os
import threading
import time

from sterna import Engine, EngineBusy, Form
from sterna.engine import Answer

from .stand_in import EOS, N_CTX, N_VOCAB, answer
from .support import BOTH_FORMS, STAND_IN, EngineTest


class AnswerTest(EngineTest):
    def test_both_forms_give_what_the_model_says(self) -> None:
        for form in BOTH_FORMS:
            engine = self.engine(form=form)
            for prompt in ([20], [21, 22, 23], list(range(N_VOCAB))):
                for max_tokens in (0, 1, 2, 7):
                    with self.subTest(form=form, prompt=prompt, max_tokens=max_tokens):
                        given = engine.generate(prompt, max_tokens=max_tokens)
                        self.assertEqual(given, answer(prompt, max_tokens))

    def test_why_an_answer_ended(self) -> None:
        for form in BOTH_FORMS:
            with self.subTest(form=form):
                engine = self.engine(form=form)
                stream = engine.stream([20])
                self.assertIsNone(stream.finish_reason)
                self.assertEqual(list(stream), answer([20]))
                self.assertEqual((stream.finish_reason, stream.tokens), ("stop", tuple(answer([20]))))
                stream = engine.stream([20], max_tokens=2)
                self.assertEqual(len(list(stream)), 2)
                self.assertEqual(stream.finish_reason, "length")
                self.assertEqual(list(stream), [])

    def test_the_end_of_the_context(self) -> None:
        for form in BOTH_FORMS:
            with self.subTest(form=form):
                engine = self.engine("small-context", "endless", form=form)
                stream = engine.stream([20] * 30)
                # The last token of a context need not be computed.
                self.assertEqual(len(list(stream)), 11)
                self.assertEqual(stream.finish_reason, "length")
                self.assertEqual(len(engine.generate([20] * 39)), 2)
                self.assertEqual(len(engine.generate([20] * 39, max_tokens=2)), 2)
                self.assertEqual(len(engine.generate([20] * 39, max_tokens=1)), 1)

    def test_each_token_is_there_when_the_worker_made_it(self) -> None:
        for form in BOTH_FORMS:
            with self.subTest(form=form):
                for n in range(1, 6):
                    path = os.path.join(self.model, f"go-{n}")
                    if os.path.exists(path):
                        os.remove(path)
                stream = self.engine("step", "endless", form=form, token_timeout=20).stream(
                    [20], max_tokens=5
                )
                for n, _ in enumerate(stream, 1):
                    # The worker makes no other token before this.
                    with open(os.path.join(self.model, f"go-{n}"), "w"):
                        pass
                self.assertEqual(len(stream.tokens), 5)

    def test_a_big_prompt(self) -> None:
        prompt = [n % N_VOCAB for n in range(100_000)]
        for form in BOTH_FORMS:
            with self.subTest(form=form):
                self.assertEqual(self.engine(form=form).generate(prompt, max_tokens=3), answer(prompt, 3))

    def test_tokens_that_the_model_does_not_have(self) -> None:
        engine = self.engine()
        for tokens, says in (
            ([], "at least one"),
            ([20, N_VOCAB], r"tokens\[1\]: 100"),
            ([-1], r"tokens\[0\]: -1"),
            ([20] * N_CTX, "no room"),
        ):
            with self.assertRaisesRegex(ValueError, says):
                engine.generate(tokens)
        with self.assertRaisesRegex(ValueError, "max_tokens"):
            engine.generate([20], max_tokens=-1)
        with self.assertRaises(TypeError):
            engine.generate([20.5])  # type: ignore[list-item]
        self.assertEqual(engine.generate([20]), answer([20]))

    def test_a_model_that_names_no_end(self) -> None:
        for form in BOTH_FORMS:
            with self.subTest(form=form):
                with self.assertRaisesRegex(ValueError, "eos"):
                    self.engine("no-eos", form=form)
                self.assertEqual(self.engine("no-eos", form=form, eos=EOS).generate([20]), answer([20]))

    def test_encode(self) -> None:
        engine = self.engine()
        self.assertEqual(engine.encode("AB"), [1, 65, 66])
        self.assertEqual(engine.encode("--é\0", special=False), [45, 45, 95, 69, 0])

    def test_asynchronous_reading(self) -> None:
        engine = self.engine()

        async def read() -> list[int]:
            return [token async for token in engine.stream([20])]

        self.assertEqual(asyncio.run(read()), answer([20]))

    def test_a_cancelled_task_cancels_its_answer(self) -> None:
        engine = self.engine("hangs")

        async def read(stream: Answer) -> None:
            async for _ in stream:
                pass

        async def run() -> None:
            stream = engine.stream([20])
            with self.assertRaises(asyncio.TimeoutError):
                await asyncio.wait_for(read(stream), 0.5)
            self.assertEqual(stream.finish_reason, "cancelled")

        asyncio.run(run())
        self.behave()
        self.assertEqual(engine.generate([20]), answer([20]))


class CacheTest(EngineTest):
    def kept_and_new(self) -> list[tuple[int, int]]:
        """For each request, how many positions were kept and how many tokens were new."""
        return [
            (int(request["kv_position"]), len(request["tokens"].split(",")))
            for request in self.requests_read()
        ]

    def test_only_what_is_new_is_sent(self) -> None:
        engine = self.engine()
        prompt = [20, 21, 22]
        first = engine.generate(prompt)
        self.assertEqual(engine.n_cached, 3 + len(first))
        longer = [*prompt, *first, EOS[0], 30, 31]
        self.assertEqual(engine.generate(longer), answer(longer))
        self.assertEqual(self.kept_and_new(), [(0, 3), (3 + len(first), 3)])

    def test_rollback(self) -> None:
        engine = self.engine()
        engine.generate([20, 21, 22, 23], max_tokens=3)
        for prompt in ([20, 21, 40], [20, 21], [20, 21], [50]):
            self.assertEqual(engine.generate(prompt, max_tokens=3), answer(prompt, 3))
        self.assertEqual(self.kept_and_new(), [(0, 4), (2, 1), (1, 1), (1, 1), (0, 1)])

    def test_version_1_continues_or_begins_anew(self) -> None:
        engine = self.engine(form=Form.V1)
        first = engine.generate([20, 21], max_tokens=3)
        for prompt in ([20, 21, *first, 30], [20, 21, 40], [20, 21]):
            self.assertEqual(engine.generate(prompt, max_tokens=3), answer(prompt, 3))
        lines = self.read_by_worker().splitlines()
        # One line of tokens to keep, and all new ones: the last answer token was not cached.
        self.assertEqual(lines[10:20], ["2", "0", "0.6", "50", "0.9", "1.1", "64", "3", str(first[-1]), "30"])
        self.assertEqual(lines[20:22], ["3", "1"])
        self.assertEqual(lines[31:33], ["2", "1"])

    def test_a_worker_may_forget(self) -> None:
        engine = self.engine("forgetful")
        engine.generate([20, 21, 22], max_tokens=2)
        self.assertEqual(engine.n_cached, 2)
        self.assertEqual(engine.generate([20, 21, 22, 23], max_tokens=2), answer([20, 21, 22, 23], 2))
        self.assertEqual(self.kept_and_new()[1], (2, 2))


class CancelTest(EngineTest):
    def test_the_answer_after_a_cancelled_one_is_right(self) -> None:
        for form in BOTH_FORMS:
            with self.subTest(form=form):
                engine = self.engine("endless", form=form)
                stream = engine.stream([20, 21])
                self.assertEqual([next(stream) for _ in range(5)], [11] * 5)
                stream.cancel()
                self.assertEqual((list(stream), stream.finish_reason), ([], "cancelled"))
                self.assertEqual(engine.n_cached, 0)
                self.behave()
                self.assertEqual(engine.generate([20, 21]), answer([20, 21]))

    def test_nothing_is_started_before_it_is_needed(self) -> None:
        engine = self.engine("endless")
        engine.stream([20]).close()
        self.assertIsNone(engine._worker)
        n_runs = len(self.arguments())
        engine.close()
        self.assertEqual(len(self.arguments()), n_runs)

    def test_an_answer_that_is_dropped_is_cancelled(self) -> None:
        engine = self.engine("endless")
        for token in engine.stream([20]):
            self.assertEqual(token, 11)
            break
        self.behave()
        self.assertEqual(engine.generate([20]), answer([20]))

    def test_from_another_thread_while_one_waits(self) -> None:
        for cancel in (Engine.cancel, Engine.close):
            with self.subTest(cancel=cancel):
                engine = self.engine("hangs")
                given: list[list[int]] = []
                reader = threading.Thread(target=lambda e=engine, g=given: g.append(e.generate([20])))
                reader.start()
                while engine._turn is None:
                    time.sleep(0.001)
                time.sleep(0.2)
                start = time.monotonic()
                cancel(engine)
                reader.join(10)
                self.assertLess(time.monotonic() - start, 5)
                self.assertEqual(given, [answer([20], 2)])

    def test_many_threads_cancel_at_once(self) -> None:
        engine = self.engine("endless")
        for _ in range(5):
            stream = engine.stream([20])
            next(stream)
            threads = [threading.Thread(target=stop) for stop in [stream.cancel, engine.cancel] * 4]
            for thread in threads:
                thread.start()
            self.assertLess(len(list(stream)), 10_000)
            for thread in threads:
                thread.join()
        self.behave()
        self.assertEqual(engine.generate([20]), answer([20]))

    def test_a_late_cancel_leaves_the_next_answer_alone(self) -> None:
        engine = self.engine()
        first = engine.stream([20])
        list(first)
        second = engine.stream([21])
        first.cancel()
        # One that had begun when the first answer ended, too.
        engine._abandon(first._turn)
        self.assertEqual(list(second), answer([21]))
        self.assertEqual(first.finish_reason, "stop")
        engine.cancel()
        self.assertEqual(engine.generate([22]), answer([22]))
        self.assertEqual(len(self.arguments()), 3, "one worker, its version and its configuration")

    def test_one_answer_at_a_time(self) -> None:
        engine = self.engine("endless")
        with engine.stream([20]) as stream:
            next(stream)
            with self.assertRaises(EngineBusy):
                engine.generate([21])
            self.assertEqual(next(stream), 11)
        self.behave()
        self.assertEqual(engine.generate([21]), answer([21]))

    def test_a_closed_engine(self) -> None:
        with Engine(self.model, program=STAND_IN) as engine:
            pass
        engine.close()
        with self.assertRaisesRegex(ValueError, "closed"):
            engine.generate([20])

    def test_an_engine_that_is_dropped_says_so_and_leaves_nothing(self) -> None:
        engine = Engine(self.model, program=STAND_IN)
        with self.assertWarnsRegex(ResourceWarning, "unclosed <sterna.Engine"):
            del engine
