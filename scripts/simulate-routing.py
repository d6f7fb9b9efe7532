#!/usr/bin/env python3
"""How prompt caches and latency depend on the number of servers and on who chooses between them.

    scripts/simulate-routing.py [--servers 1,2,4,8] [--rate PER_SERVER] [--seconds S] [--seed N] …

A simulation step by step, of people who chat: a conversation begins with one of some system prompts, has several turns,
and each turn's prompt is all that was said before. A server has one engine: a step decodes a token of every running answer
and reads a chunk of the first prompt in the queue, and takes as long as was measured (`--step`, `--token`, `--prompt`:
by default Llama-1B in Q4_K on an H200, docs/benchmarks-history.md). Its cache holds so many tokens of conversations, the least
recently used goes. Beginnings that conversations share count once.

Policies: random; turns (round robin); loads (fewest tokens to compute); hash (a conversation's first turn decides); prefix (fewest
tokens to compute before the answer begins, counting what the server holds: what `sterna serve --gpus` does, and cache-aware
gateways approximate).
"""

import argparse
import heapq
import itertools
import random
from collections import OrderedDict, deque
from dataclasses import dataclass, field

POLICIES = ["random", "turns", "loads", "hash", "prefix"]


@dataclass(eq=False)
class Request:
    """A turn of a conversation."""

    conversation: int
    system: int
    shared: int
    """Tokens of the system prompt."""
    length: int
    """Tokens of the prompt, with it."""
    answer: int
    asked: float
    left: int = 0
    """Tokens of the prompt that aren't computed yet."""
    to_say: int = 0
    first: float = 0.0


@dataclass(eq=False)
class Server:
    """One engine, its queue and its cache."""

    options: argparse.Namespace
    queue: deque = field(default_factory=deque)
    running: list = field(default_factory=list)
    held: OrderedDict = field(default_factory=OrderedDict)
    """Tokens of a conversation behind its system prompt, and of system prompts: ("system", number)."""
    n_held: int = 0
    busy: bool = False

    def cached(self, request: Request) -> int:
        """Tokens of its prompt that are here."""
        of_system = self.held.get(("system", request.system), 0)
        return of_system + (self.held.get(request.conversation, 0) if of_system else 0)

    def work(self) -> int:
        """Tokens of prompts that are to be computed."""
        return sum(request.left for request in self.queue)

    def keep(self, request: Request, length: int) -> None:
        """Remembers a conversation, and then its system prompt, which stays longer."""
        pieces = {request.conversation: length - request.shared, ("system", request.system): request.shared}
        for key, tokens in pieces.items():
            self.n_held += tokens - self.held.pop(key, 0)
            self.held[key] = tokens
        while self.n_held > self.options.cache and len(self.held) > len(pieces):
            self.n_held -= self.held.popitem(last=False)[1]

    def step(self, now: float) -> tuple[float, list[Request]]:
        """Computes a step from `now` on: when it is over, and the answers that are."""
        o = self.options
        time = (o.step + o.token * len(self.running)) / 1e3 if self.running else 0.0
        chunk = o.chunk
        begun = []
        while chunk and self.queue and len(self.running) + len(begun) < o.parallel:
            request = self.queue[0]
            n = min(chunk, request.left)
            request.left -= n
            chunk -= n
            time += n / o.prompt
            if request.left:
                break
            begun.append(self.queue.popleft())
        end = now + time
        done = []
        for request in self.running:
            request.to_say -= 1
        for request in begun:
            request.first = end
            request.to_say = request.answer - 1
        for request in [*self.running, *begun]:
            if request.to_say <= 0:
                done.append(request)
                self.keep(request, request.length + request.answer)
        self.running = [request for request in [*self.running, *begun] if request.to_say > 0]
        return end, done


def choose(policy: str, servers: list[Server], request: Request, turn: int, draw: random.Random) -> Server:
    """The server that a request goes to."""
    if policy == "random":
        return draw.choice(servers)
    if policy == "turns":
        return servers[turn % len(servers)]
    if policy == "hash":
        return servers[hash((request.conversation, "of")) % len(servers)]
    if policy == "loads":
        return min(servers, key=lambda s: (s.work(), len(s.running)))
    return min(servers, key=lambda s: (s.work() + request.length - s.cached(request), len(s.running)))


def simulate(policy: str, n: int, o: argparse.Namespace) -> dict:
    """A run with `n` servers: the share of prompts that was held, times to the first token, tokens per second."""
    draw = random.Random(o.seed)
    servers = [Server(o) for _ in range(n)]
    count = itertools.count()
    events: list = []

    def later(at: float, what: str, of: object) -> None:
        heapq.heappush(events, (at, next(count), what, of))

    def turn_of(conversation: int, system: int, said: int, turns: int, at: float) -> None:
        more = max(1, round(draw.expovariate(1 / o.user)))
        answer = max(2, round(draw.expovariate(1 / o.answer)))
        request = Request(conversation, system, o.system, said + more, answer, at)
        later(at, "ask", (request, turns - 1))

    # Conversations begin so often that turns come at the rate.
    at = 0.0
    for conversation in itertools.count():
        at += draw.expovariate(o.rate * n / o.turns)
        if at > o.seconds:
            break
        turns = max(1, round(draw.expovariate(1 / o.turns)))
        turn_of(conversation, draw.randrange(o.systems), o.system, turns, at)

    asked, cached, firsts, said = 0, 0, [], 0
    follow: dict[int, int] = {}
    turn = 0
    while events:
        now, _, what, of = heapq.heappop(events)
        if what == "ask":
            request, turns = of
            follow[id(request)] = turns
            server = choose(policy, servers, request, turn, draw)
            turn += 1
            here = min(server.cached(request), request.length - 1)
            request.left = request.length - here
            asked += request.length
            cached += here
            server.queue.append(request)
            if not server.busy:
                server.busy = True
                later(now, "step", server)
        else:
            server = of
            end, done = server.step(now)
            for request in done:
                firsts.append(request.first - request.asked)
                said += request.answer
                turns = follow.pop(id(request))
                if turns > 0:
                    pause = draw.expovariate(1 / o.pause)
                    length = request.length + request.answer
                    turn_of(request.conversation, request.system, length, turns, end + pause)
            if server.queue or server.running:
                later(end, "step", server)
            else:
                server.busy = False
    firsts.sort()
    at_share = lambda share: 1e3 * firsts[min(len(firsts) - 1, int(share * len(firsts)))]
    return {"hit": cached / asked, "median": at_share(0.5), "p95": at_share(0.95), "answers": len(firsts), "said": said}


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--servers", default="1,2,4,8", help="numbers of servers")
    add("--rate", type=float, default=20, help="turns a second for each server")
    add("--seconds", type=float, default=120, help="for how long conversations begin")
    add("--turns", type=float, default=6, help="turns of a conversation, on average")
    add("--pause", type=float, default=20, help="seconds between an answer and the next turn, on average")
    add("--systems", type=int, default=8, help="different system prompts")
    add("--system", type=int, default=800, help="tokens of each")
    add("--user", type=float, default=150, help="tokens that a turn adds, on average")
    add("--answer", type=float, default=200, help="tokens of an answer, on average")
    add("--cache", type=int, default=400_000, help="tokens that a server's cache holds")
    add("--parallel", type=int, default=64, help="answers that a server computes at once")
    add("--chunk", type=int, default=512, help="tokens of prompts in a step")
    add("--step", type=float, default=2.95, help="milliseconds of a step")
    add("--token", type=float, default=0.02, help="milliseconds more for each answer")
    add("--prompt", type=float, default=38_700, help="tokens of prompts a second")
    add("--seed", type=int, default=1)
    o = parser.parse_args()
    print("| servers | policy | held, % of prompts | first token, ms: median | 95 % | answers |")
    print("|---|---|---|---|---|---|")
    for n in map(int, o.servers.split(",")):
        for policy in POLICIES if n > 1 else ["prefix"]:
            r = simulate(policy, n, o)
            name = policy if n > 1 else "(one)"
            print(f"| {n} | {name} | {r['hit']:.0%} | {r['median']:.0f} | {r['p95']:.0f} | {r['answers']} |", flush=True)


if __name__ == "__main__":
    main()
