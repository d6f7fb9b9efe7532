"""A batch job on four nodes of Ray on one machine, one of which is killed. Not a unit test: needs ``ray[data]``.

STERNA_PROGRAM=… python -m tests.ray_nodes [PROMPTS]
"""

from __future__ import annotations

import collections
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import sterna
from sterna import ray as jobs

PROGRAM = os.environ["STERNA_PROGRAM"]
OPTIONS: dict[str, Any] = {"max_tokens": 16, "temperature": 0}


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    names = ["Tom", "Lily", "Ben", "Mia", "Sam", "Anna", "Max", "Ruby"]
    prompts = [f"Number {i}: {names[i % len(names)]} went to the" for i in range(n)]
    with sterna.load("builtin", program=PROGRAM) as model:
        expected = [answer.text for answer in model.batch(prompts, **OPTIONS)]
    print(f"one process: {n} answers", flush=True)

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(4)]
    ray.init(address=cluster.address, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    folder = Path(tempfile.mkdtemp(prefix="sterna-ray-"))

    def written() -> int:
        return sum(path.read_bytes().count(b"\n") for path in folder.glob("*.jsonl"))

    at: list[int] = []

    def kill() -> None:
        while written() < n // 4:
            time.sleep(0.05)
        at.append(written())
        cluster.remove_node(nodes[1], allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    dataset = ray.data.from_items([{"id": i, "prompt": text} for i, text in enumerate(prompts)])
    rows = jobs.complete(
        dataset.repartition(64),
        "builtin",
        folder=folder,
        workers=(1, 4),
        batch_size=32,
        load={"program": PROGRAM},
        **OPTIONS,
    ).take_all()
    killer.join(1)
    assert at, "the job was over before a node was killed"
    ids = collections.Counter(row["id"] for row in rows)
    assert len(ids) == n and set(ids.values()) == {1}, "lost or doubled"
    assert all(row["answer"] == expected[row["id"]] for row in rows), "another answer"
    before = written()
    print(
        f"four nodes: {n} answers, none lost, none doubled, all equal; a node killed after {at[0]}; {before} computed"
    )

    again = jobs.complete(
        dataset, "builtin", folder=folder, workers=1, load={"program": PROGRAM}, **OPTIONS
    ).take_all()
    assert {row["id"]: row["answer"] for row in again} == dict(enumerate(expected))
    assert written() == before, "computed again"
    print("begun again: nothing computed")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
