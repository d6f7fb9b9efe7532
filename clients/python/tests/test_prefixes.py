"""What a gateway knows of prompts, without Ray."""

from __future__ import annotations

import json
import unittest
from typing import Any

from sterna._prefixes import Holders, beginnings


def of(**asked: Any) -> list[tuple[bytes, int]]:
    return beginnings(json.dumps({"model": "m", **asked}).encode())


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class BeginningsTest(unittest.TestCase):
    def test_a_conversation_begins_with_its_earlier_turns(self) -> None:
        first = of(messages=[user("Hello")], max_tokens=3)
        second = of(
            messages=[user("Hello"), {"role": "assistant", "content": "Hi"}, user("And?")], stream=True
        )
        self.assertEqual(second[: len(first)], first)
        self.assertGreater(len(second), len(first))

    def test_other_models_systems_and_tools_share_nothing(self) -> None:
        first = {digest for digest, _ in of(messages=[user("Hello")])}
        for other in ({"model": "other"}, {"system": "Be short."}, {"tools": [{"name": "t"}]}):
            asked = {"messages": [user("Hello")], **other}
            self.assertFalse(first & {digest for digest, _ in of(**asked)}, other)

    def test_texts_and_ids_share_whole_blocks(self) -> None:
        text = "Once upon a time. " * 40
        ids = list(range(300))
        for name, shorter, longer in (
            ("prompt", text, text + "And then?"),
            ("input", text, text + "And then?"),
            ("prompt", ids, [*ids, 7]),
        ):
            first, second = of(**{name: shorter}), of(**{name: longer})
            n_shared = sum(a == b for a, b in zip(first, second, strict=False))
            self.assertGreaterEqual(n_shared, len(first) - 1)
            self.assertGreater(n_shared, 1)

    def test_what_is_no_request_has_none(self) -> None:
        for body in (b"", b"{", b"[1]", b"\xff", b"[" * 100_000, b"{}"):
            self.assertEqual(beginnings(body), [])


class HoldersTest(unittest.TestCase):
    def test_each_has_as_much_as_it_was_given(self) -> None:
        first, second = of(messages=[user("Hello")]), of(messages=[user("Hello"), user("And?")])
        holders: Holders[str] = Holders()
        holders.add(first, "a")
        holders.add(second, "b")
        held = holders.held(second, {"a", "b", "c"})
        self.assertEqual(held, {"a": first[-1][1], "b": second[-1][1]})

    def test_who_is_gone_has_nothing(self) -> None:
        prompt = of(messages=[user("Hello")])
        holders: Holders[str] = Holders()
        holders.add(prompt, "a")
        self.assertEqual(holders.held(prompt, {"b"}), {})
        self.assertEqual(holders.held(prompt, {"a"}), {})

    def test_the_oldest_are_forgotten_and_the_longest_first(self) -> None:
        prompts = [of(messages=[user("Hello"), user(f"Number {i}"), user("And?")]) for i in range(3)]
        holders: Holders[str] = Holders(limit=5)
        for prompt in prompts:
            holders.add(prompt, "a")
        # What all begin with, two of the last and two of the one before.
        self.assertEqual(
            [holders.held(prompt, {"a"}).get("a") for prompt in prompts],
            [prompts[0][0][1], prompts[1][-1][1], prompts[2][-1][1]],
        )


if __name__ == "__main__":
    unittest.main()
