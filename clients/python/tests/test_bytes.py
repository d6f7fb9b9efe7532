"""What goes through the pipes, byte for byte."""

from __future__ import annotations

import unittest

from sterna import GREEDY, Form, ProtocolError, Sampling
from sterna._protocol import Config, reply_integer, request

from .support import EngineTest

CONFIG = "2 1 128 256 2 4 2 100 32 150000 1e-05 10000.0 1 0 0 0 0 2 7 8"

INIT = """\
18
protocol_version=1
arch_type=2
activation=1
hidden_dim=128
intermediate_dim=256
num_layers=2
num_heads=4
num_kv_heads=2
vocab_size=100
head_dim=32
max_position_embeddings=150000
norm_eps=1e-05
rope_theta=10000.0
tie_word_embeddings=1
has_qkv_bias=0
has_attn_sub_norm=0
has_ffn_sub_norm=0
eos_tokens=7,8
"""


class ConfigTest(unittest.TestCase):
    def test_arguments_come_back_as_they_were_printed(self) -> None:
        config = Config.parse(CONFIG + "\n")
        self.assertEqual(" ".join(config.arguments(0)), CONFIG)
        self.assertEqual((config.n_vocab, config.n_ctx, config.eos), (100, 150_000, (7, 8)))
        self.assertEqual(config.arguments(3)[16], "3")

    def test_init_block(self) -> None:
        config = Config.parse(CONFIG)
        self.assertEqual(config.init_block(0, []).decode(), INIT)
        extra = config.init_block(4, [("lora_dir", "/a b/c")]).decode()
        self.assertEqual(extra, INIT.replace("18\n", "20\n", 1) + "num_threads=4\nlora_dir=/a b/c\n")

    def test_a_line_break_would_end_the_value(self) -> None:
        with self.assertRaisesRegex(ValueError, "lora_dir"):
            Config.parse(CONFIG).init_block(0, [("lora_dir", "a\nb")])

    def test_more_end_ids_than_version_1_has_room_for(self) -> None:
        config = Config.parse(CONFIG[: CONFIG.rindex("2 7 8")] + "9 1 2 3 4 5 6 7 8 9")
        self.assertIn(b"eos_tokens=1,2,3,4,5,6,7,8,9\n", config.init_block(0, []))
        with self.assertRaisesRegex(ValueError, "room for 8"):
            config.arguments(0)

    def test_malformed_lines(self) -> None:
        for line, says in (
            ("", "found 0"),
            ("2 1 128", "found 3"),
            (CONFIG + " 9", "2 end-of-sequence ids announced, found 3"),
            (CONFIG.replace(" 100 ", " 1e2 "), "vocab_size"),
            (CONFIG.replace(" 100 ", " 0 "), "vocab_size"),
            (CONFIG.replace(" 100 ", " ١٠ "), "vocab_size"),
            (CONFIG.replace("2 7 8", "-1"), "num_eos_tokens"),
        ):
            with self.subTest(line=line), self.assertRaisesRegex(ProtocolError, says):
                Config.parse(line)


class RequestTest(unittest.TestCase):
    def test_key_value(self) -> None:
        self.assertEqual(
            request(Form.KEY_VALUE, 3, [5, 6], Sampling(), 64),
            b"8\nkv_position=3\ntokens=5,6\ntemperature=0.6\ntop_k=50\ntop_p=0.9\n"
            b"repetition_penalty=1.1\nrep_penalty_lookback=64\nmax_tokens=64\n",
        )

    def test_version_1(self) -> None:
        self.assertEqual(request(Form.V1, 0, [5, 6], GREEDY, 4), b"2\n1\n0.0\n0\n1.0\n1.0\n0\n4\n5\n6\n")
        self.assertEqual(request(Form.V1, 9, [5], Sampling(), 0), b"1\n0\n0.6\n50\n0.9\n1.1\n64\n0\n5\n")

    def test_no_token_would_end_a_worker_of_version_1(self) -> None:
        with self.assertRaises(ValueError):
            request(Form.V1, 1, [], GREEDY, 1)

    def test_replies(self) -> None:
        self.assertEqual(reply_integer(b"42\n", "a token", 43), 42)
        self.assertEqual(reply_integer(b"42\r\n", "a token", 43), 42)
        for line in (b"43\n", b"-1\n", b"4 2\n", b" 42\n", b"4_2\n", b"+4\n", b"\n", b"4", b"\xff\n"):
            with self.subTest(line=line), self.assertRaisesRegex(ProtocolError, "a token"):
                reply_integer(line, "a token", 43)

    def test_sampling_options_out_of_range(self) -> None:
        nan = float("nan")
        for options in (
            {"temperature": -0.1},
            {"temperature": nan},
            {"top_k": -1},
            {"top_p": 0.0},
            {"top_p": 1.1},
            {"repetition_penalty": 0.0},
            {"repetition_penalty": float("inf")},
            {"rep_penalty_lookback": -1},
        ):
            name = next(iter(options))
            with self.subTest(options=options), self.assertRaisesRegex(ValueError, name):
                Sampling(**options)


class TranscriptTest(EngineTest):
    def test_key_value(self) -> None:
        with self.engine(threads=2) as engine:
            engine.generate([20, 21], sampling=GREEDY, max_tokens=3)
        self.assertEqual(self.arguments()[-1], ["worker", self.model])
        self.assertEqual(
            self.read_by_worker(),
            INIT.replace("18\n", "19\n", 1)
            + "num_threads=2\n8\nkv_position=0\ntokens=20,21\ntemperature=0.0\ntop_k=0\ntop_p=1.0\n"
            "repetition_penalty=1.0\nrep_penalty_lookback=0\nmax_tokens=3\n0\n",
        )

    def test_version_1(self) -> None:
        with self.engine(form=Form.V1, threads=2, lora=self.model) as engine:
            engine.generate([20, 21], sampling=GREEDY, max_tokens=3)
        expected = CONFIG.replace("0 0 2 7 8", "0 2 2 7 8")
        self.assertEqual(
            self.arguments()[-1], ["worker", self.model, "--lora", "--config", *expected.split()]
        )
        self.assertEqual(self.read_by_worker(), "2\n1\n0.0\n0\n1.0\n1.0\n0\n3\n20\n21\n0\n")

    def test_optional_keys(self) -> None:
        with self.engine(lora="adapter", lora_quant="q8_0", unembed_quant="q8_0", eos=[9]) as engine:
            engine.generate([20], max_tokens=1)
        read = self.read_by_worker()
        self.assertIn("\neos_tokens=9\nlora_dir=adapter\nlora_quant=q8_0\nunembed_quant=q8_0\n", read)

    def test_what_version_1_cannot_say(self) -> None:
        for options in ({"lora": "elsewhere"}, {"lora_quant": "q8_0"}, {"unembed_quant": "q8_0"}):
            with self.subTest(options=options), self.assertRaisesRegex(ValueError, "version 1"):
                self.engine(form=Form.V1, **options)
