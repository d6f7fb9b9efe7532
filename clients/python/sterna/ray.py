"""On Ray: batch jobs, a column of prompts and a column of answers; and an API server of several replicas.

The first needs ``ray[data]``, the second ``ray[serve]``. Each actor owns a server, so each node needs the program and the
model; a package or a GGUF file at an URL is fetched by each node once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .model import Completion, Model

if TYPE_CHECKING:
    from ray.data import Dataset
    from ray.serve import Application


def complete(
    dataset: Dataset,
    model: str | os.PathLike[str],
    *,
    prompt: str = "prompt",
    answer: str = "answer",
    folder: str | os.PathLike[str] | None = None,
    workers: int | tuple[int, int] = 1,
    cpus: float = 1.0,
    gpus: float = 0.0,
    at_once: int = 16,
    batch_size: int = 64,
    load: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """``dataset`` with what follows each ``prompt`` in the column ``answer``.

    ``workers`` actors, or between so many and so many, own a server each, with ``cpus`` and ``gpus`` of a node; ``load`` is
    what :class:`Model` takes, ``options`` what :meth:`Model.generate` does. A server answers ``at_once`` prompts in shared
    steps, which changes no answer.

    With a ``folder`` that all nodes see, answers are written there as soon as they are made, by a digest of the model's name,
    the prompt and the options; a job that is begun again computes those that aren't there. An actor that is lost is begun
    again, on another node if need be, and so is its batch: each row has one answer in the end.
    """
    # Only where it is used, so that the package has no need of Ray.
    from ray.data import ActorPoolStrategy

    least, most = (workers, workers) if isinstance(workers, int) else workers
    settings = {"threads": max(1, int(cpus)), **(load or {})}
    return dataset.map_batches(
        _Completer,
        fn_constructor_args=(os.fspath(model), prompt, answer, None if folder is None else os.fspath(folder)),
        fn_constructor_kwargs={"at_once": at_once, "load": settings, "options": options},
        batch_size=batch_size,
        compute=ActorPoolStrategy(min_size=least, max_size=most),
        num_cpus=cpus,
        num_gpus=gpus or None,
    )


def deployment(
    model: str | os.PathLike[str],
    *,
    replicas: int | tuple[int, int] = 1,
    cpus: float = 1.0,
    gpus: float = 0.0,
    at_once: int = 8,
    queue: int = 64,
    gateways: int = 1,
    api_keys: str | os.PathLike[str] | None = None,
    drain: float = 600.0,
    autoscaling: Mapping[str, Any] | None = None,
    load: Mapping[str, Any] | None = None,
) -> Application:
    """An application for ``ray.serve.run``: the API of ``sterna serve``, from replicas that own a server each.

    ``replicas``, or between so many and so many, have ``cpus`` and ``gpus`` of a node each, and answer ``at_once`` requests
    in shared steps; there are as many as it takes for that to be what each has, waiting requests counted. ``autoscaling``
    has further settings of Serve's ``AutoscalingConfig``, ``load`` is what :class:`Model` takes.

    ``gateways`` read prompts: a request goes to the replica that has most of its prompt, unless that is busy, and to
    another one if its replica is lost before the first byte of the answer. In each, ``queue`` requests wait at most; others
    are refused with status 429. A replica that is to end has ``drain`` seconds for what it answers.

    ``api_keys`` is a list as ``sterna serve --api-keys`` takes, on each node; without it whoever reaches Serve's address
    is answered.
    """
    from ._ray_serve import application

    least, most = (replicas, replicas) if isinstance(replicas, int) else replicas
    return application(
        os.fspath(model),
        least=least,
        most=most,
        cpus=cpus,
        gpus=gpus,
        at_once=at_once,
        queue=queue,
        gateways=gateways,
        api_keys=None if api_keys is None else os.fspath(api_keys),
        drain=drain,
        autoscaling=autoscaling or {},
        load={"threads": max(1, int(cpus)), **(load or {})},
    )


class _Completer:
    """What an actor does with a batch."""

    def __init__(
        self,
        model: str,
        prompt: str,
        answer: str,
        folder: str | None,
        *,
        at_once: int,
        load: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self._columns = (prompt, answer)
        self._options: dict[str, Any] = dict(options)
        self._asked = {"model": model, "options": self._options}
        self._at_once = at_once
        self._answers = None if folder is None else Answers(Path(folder))
        self._model = Model(model, **load)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        prompt, answer = self._columns
        prompts = [str(text) for text in batch[prompt]]
        keys = [digest({**self._asked, "prompt": text}) for text in prompts]
        held = {} if self._answers is None else self._answers.held(keys)
        # The same prompt twice is computed once.
        missing = {key: text for key, text in zip(keys, prompts, strict=True) if key not in held}
        made: list[Completion] = self._model.batch(
            list(missing.values()), at_once=self._at_once, **self._options
        )
        new = dict(zip(missing, (completion.text for completion in made), strict=True))
        if self._answers is not None:
            self._answers.add(new)
        held.update(new)
        return {**batch, answer: [held[key] for key in keys]}

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            self._model.close()


def digest(asked: Mapping[str, Any]) -> str:
    """The key of an answer: SHA-256 of what was asked, as JSON with sorted keys."""
    text = json.dumps(asked, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class Answers:
    """Answers by their keys, in a folder that several processes write to.

    Each process appends to a file of its own, a line for each answer, so that none waits for another and a line that was
    cut off costs that answer only.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._own = folder / f"{uuid.uuid4().hex}.jsonl"
        self._file: IO[str] | None = None
        self._lock = threading.Lock()
        self._read: dict[Path, int] = {}
        self._all: dict[str, str] = {}

    def held(self, keys: Iterable[str]) -> dict[str, str]:
        """The answers that are there, whoever wrote them."""
        with self._lock:
            for path in self._folder.glob("*.jsonl"):
                self._read_on(path)
            return {key: self._all[key] for key in keys if key in self._all}

    def add(self, answers: Mapping[str, str]) -> None:
        """Writes answers; they are on disk when it returns."""
        if not answers:
            return
        lines = [json.dumps({"key": key, "answer": answer}) for key, answer in answers.items()]
        with self._lock:
            if self._file is None:
                self._file = self._own.open("a", encoding="utf-8")
            self._file.write("".join(f"{line}\n" for line in lines))
            self._file.flush()
            os.fsync(self._file.fileno())

    def _read_on(self, path: Path) -> None:
        """Reads what a file has more than last time: whole lines."""
        first = self._read.get(path, 0)
        with path.open("rb") as file:
            file.seek(first)
            more = file.read()
        whole = more[: more.rfind(b"\n") + 1]
        self._read[path] = first + len(whole)
        for line in whole.splitlines():
            try:
                entry = json.loads(line)
                self._all[str(entry["key"])] = str(entry["answer"])
            except (ValueError, KeyError, TypeError):
                # Damaged: that answer is computed again.
                continue

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            if self._file is not None:
                self._file.close()
