"""Asks a model the questions of a task: answers go to a file as they come, and a run resumes.

A task says what is asked, shown and right; everything else is here and the same for all of them.
"""

from __future__ import annotations

import json
import platform
import sys
import time
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tqdm import tqdm

from dlm_decode.errors import InvalidInputError
from dlm_decode.registry import describe
from dlm_decode.settings import Settings, resolve_settings

if TYPE_CHECKING:
    from dlm_decode.vlm import DiffusionVlm, Output

__all__ = [
    "Results",
    "Sample",
    "Task",
    "batches",
    "check_options",
    "check_sizes",
    "cost_of",
    "decoding_settings",
    "evaluate",
    "report_path",
    "settings_of",
    "summarise",
]

Entry = dict[str, Any]


class Sample(Protocol):
    """A question, as far as the runner knows it."""

    @property
    def id(self) -> str:
        """Its name; no other question of the task has it."""
        ...

    @property
    def kind(self) -> str:
        """Its group, for accuracies by kind."""
        ...

    @property
    def question(self) -> str:
        """The prompt, without media."""
        ...


S = TypeVar("S", bound=Sample)


class Task(ABC, Generic[S]):
    """A set of questions with what belongs to them.

    Attributes:
        name: for reports.
    """

    name: str

    @property
    @abstractmethod
    def data(self) -> Any:
        """What tells these questions from others, JSON-ready; a run resumes where it is equal."""

    @abstractmethod
    def samples(self, limit: int | None = None) -> Sequence[S]:
        """The first `limit` questions, in an order that never changes; all by default."""

    @abstractmethod
    def media(self, sample: S) -> dict[str, list[Any]]:
        """What is shown: lists `images` and `videos` as `generate` takes them for one prompt.

        Raises:
            MediaError: missing or unreadable; the message names the file and the reason.
        """

    @abstractmethod
    def judge(self, sample: S, text: str) -> Entry:
        """`is_right`, and whatever else the line of this answer should say."""

    @abstractmethod
    def expected(self, sample: S) -> Any:
        """The right answer, for the file."""

    def facts(self, sample: S) -> Entry:
        """What the line of every answer says about its question."""
        return {
            "id": sample.id,
            "kind": sample.kind,
            "question": sample.question,
            "expected": self.expected(sample),
        }

    def scores(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """The task's figures, from the lines of its answers."""
        return summarise(entries)


def evaluate(
    vlm: DiffusionVlm,
    task: Task[Any],
    options: dict[str, Any],
    *,
    output: str | Path,
    limit: int | None = None,
    batch: int = 1,
    is_blind: bool = False,
    track: Any = None,
) -> dict[str, Any]:
    """Asks those of the first `limit` questions that `output` does not answer yet.

    Args:
        vlm: the model.
        task: the questions.
        options: arguments of `generate`: sampler, stages, lengths.
        output: JSON lines; the first holds the settings, each further one a question.
        limit: number of questions; all by default.
        batch: questions per call; does not change any answer.
        is_blind: ask without pictures and videos.
        track: what `make_sample_log` takes: `"wandb"`, `"wandb:offline"`, `"trackio"`, a log, or a
            list of these.

    Returns:
        The report, which is also written to `report_path(output)`: `task`, `settings` (what the
        answers depend on: model, data, dtype, sampler, stages, cache, every length), `versions` and
        `machine` of the process that wrote it, the task's scores, and `cost`.

    Raises:
        InvalidInputError: a limit or batch below 1, or an `output` that other settings wrote.
        UnknownNameError: a `track` that does not exist.
    """
    from dlm_decode.eval.sample_log import make_sample_log

    check_sizes(limit, batch)
    samples = task.samples(limit)
    log = make_sample_log(track)
    results = Results(output, settings_of(vlm, task, options, is_blind), task)
    log.start({"task": task.name, **results.settings, "versions": versions()})
    try:
        for part in tqdm(batches(samples, batch), desc=task.name, unit="batch"):
            results.answer(vlm, part, options, is_blind)
            for entry in results.of(part):
                log.sample(entry)
    except BaseException:
        log.abort()
        raise
    entries = results.of(samples)
    report = {
        "task": task.name,
        "settings": results.settings,
        "versions": versions(),
        "machine": {
            "device": str(vlm.device),
            "attn_implementation": vlm.model.config._attn_implementation,
            "machine": platform.machine(),
            "batch": batch,
        },
        **task.scores(entries),
        "cost": cost_of(entries),
    }
    report_path(output).write_text(
        json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    log.finish(report)
    return report


def report_path(output: str | Path) -> Path:
    """Where the report of a results file is written: beside it, ending in `.report.json`."""
    output = Path(output)
    return output.with_name(output.name.removesuffix(".jsonl") + ".report.json")


def check_sizes(limit: int | None, batch: int) -> None:
    """Raises `InvalidInputError` for a limit or batch below 1."""
    if (limit is not None and limit < 1) or batch < 1:
        raise InvalidInputError(f"limit and batch must be at least 1, got {limit} and {batch}.")


def batches(samples: Sequence[S], size: int) -> list[Sequence[S]]:
    """`samples` in runs of `size`."""
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def summarise(entries: Sequence[Entry]) -> dict[str, Any]:
    """Accuracy in all and by kind, and cost relative to the baseline sampler.

    A question on which `generate` failed counts as wrong, and not at all for the cost; `errors`
    says how many there are, `first_error` what the first said.

    Args:
        entries: lines of an output file, without the settings.
    """
    errors = [entry["error"] for entry in entries if "error" in entry]
    kinds = sorted({entry["kind"] for entry in entries})
    by_kind = {
        kind: [entry["is_right"] for entry in entries if entry["kind"] == kind] for kind in kinds
    }
    total = max(1, len(entries))
    return {
        "questions": len(entries),
        "accuracy": sum(entry["is_right"] for entry in entries) / total,
        "accuracy_by_kind": {kind: sum(hits) / len(hits) for kind, hits in by_kind.items()},
        "questions_by_kind": {kind: len(hits) for kind, hits in by_kind.items()},
        "relative_cost": sum(entry["flops"] for entry in entries)
        / max(1, sum(e["baseline_flops"] for e in entries)),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
    }


def cost_of(entries: Sequence[Entry]) -> dict[str, Any]:
    """What the answered questions cost together.

    Args:
        entries: lines of an output file, without the settings; those with an error do not count.

    Returns:
        `answered`, how many questions were; FLOPs of the decoder layers (`flops`), of the head, of
        the vision encoder, and of the baseline sampler's decoder layers (`baseline_flops`);
        `forwards` by `"VIEW/kind"` and `forwards_by_view`; `baseline_forwards`, the forwards of the
        baseline sampler; `steps`; and seconds for reading media, before the first step, and for the
        steps. `None` where an older file does not say.
    """
    answered = [entry for entry in entries if "error" not in entry]
    forwards: Counter[str] = Counter()
    views: Counter[str] = Counter()
    for entry in answered:
        forwards.update(entry["forwards"])
    for kind, count in forwards.items():
        views[kind.partition("/")[0]] += count

    def total(name: str) -> float | None:
        is_known = all(name in entry for entry in answered)
        return sum(entry[name] for entry in answered) if is_known else None

    return {
        "answered": len(answered),
        "flops": total("flops"),
        "head_flops": total("head_flops"),
        "vision_flops": total("vision_flops"),
        "baseline_flops": total("baseline_flops"),
        "forwards": dict(sorted(forwards.items())),
        "forwards_by_view": dict(sorted(views.items())),
        "baseline_forwards": total("baseline_forwards"),
        "steps": total("steps"),
        "seconds_media": total("seconds_media"),
        "seconds_prefill": total("seconds_prefill"),
        "seconds_decode": total("seconds"),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that have a part in an answer; `None` if missing."""
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in ("dlm-decode", "torch", "transformers", "tokenizers", "numpy", "pillow", "av"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def decoding_settings(vlm: DiffusionVlm, options: dict[str, Any]) -> Settings:
    """What `generate` decodes with, given these of its arguments."""
    return resolve_settings(_lengths(options), vlm.generation_defaults)


def check_options(options: dict[str, Any]) -> None:
    """Raises what `generate` would about its arguments, as far as that needs no model.

    Raises:
        UnknownNameError: an unknown stage or preset.
        InvalidInputError: values that cannot work.
    """
    from dlm_decode import vision

    vision.make_all(options.get("stages"))
    given = _lengths(options)
    if given.get("gen_length") is None:  # the model's own decides what the others may be
        for name in ("steps", "block_length", "steps_per_block", "step_ratio"):
            given.pop(name, None)
    resolve_settings(given, {})


def _lengths(options: dict[str, Any]) -> dict[str, Any]:
    methods = ("sampler", "stages", "cache")
    return {key: value for key, value in options.items() if key not in methods}


def settings_of(
    vlm: DiffusionVlm, task: Task[Any], options: dict[str, Any], is_blind: bool = False
) -> dict[str, Any]:
    """What an output file depends on, as its first line says."""
    from dlm_decode import cache, samplers, vision

    policy = options.get("cache")
    return {
        "model": vlm.name,
        "weights": vlm.fingerprint,
        "data": task.data,
        "dtype": str(vlm.model.dtype).removeprefix("torch."),
        "sampler": describe(samplers.make(options.get("sampler") or vlm.own_sampler)),
        "stages": [describe(stage) for stage in vision.make_all(options.get("stages"))],
        "cache": policy if policy in (None, "none") else describe(cache.make(policy)),
        "options": {
            name: describe(value) if is_dataclass(value) else value
            for name, value in vars(decoding_settings(vlm, options)).items()
        },
        "is_blind": is_blind,
    }


class Results(Generic[S]):
    """Answers in a JSON-lines file: the settings, then a line per question, appended as they come.

    An incomplete last line, as a killed run leaves it, is cut off. Questions that failed are asked
    again by the next run.

    Args:
        path: made with its folders if missing.
        settings: must be those of the file, if it holds any.
        task: shows and judges.

    Raises:
        InvalidInputError: the file was written with other settings.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any], task: Task[S]) -> None:
        self.path = Path(path)
        self.settings = settings
        self.task = task
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._done = self._read()
        lines = [{"settings": settings}, *self._done.values()]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        fresh = self.path.with_name(self.path.name + ".tmp")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self.path)  # in one piece: a kill in between loses nothing

    def _read(self) -> dict[str, Entry]:
        if not self.path.exists() or not self.path.read_bytes().strip():
            return {}
        entries = []
        # Answers may hold what str.splitlines takes for line ends; a kill may cut a character.
        for line in self.path.read_bytes().split(b"\n"):
            try:
                entries.append(json.loads(line))
            except ValueError:
                break
        expected = json.loads(json.dumps(self.settings))
        first = entries[0] if entries and isinstance(entries[0], dict) else {}
        if first.get("settings") != expected:
            raise InvalidInputError(
                f"{str(self.path)!r} was written with other settings; choose another --output or "
                "remove it."
            )
        return {entry["id"]: entry for entry in entries[1:] if "error" not in entry}

    def answer(
        self,
        vlm: DiffusionVlm,
        samples: Sequence[S],
        options: dict[str, Any],
        is_blind: bool = False,
        batch: str | None = None,
    ) -> None:
        """Asks those of `samples` that have no answer yet, in one `generate` call.

        A question whose media cannot be read is not asked; its line holds the error. If the call
        fails, the others are asked one by one, and the lines of those that fail alone hold theirs.

        Args:
            vlm: the model.
            samples: questions.
            options: arguments of `generate`.
            is_blind: ask without pictures and videos.
            batch: name of the batch, written beside its seconds if one call answers all of it.
        """
        missing = [sample for sample in samples if sample.id not in self._done]
        if not missing:
            return
        label = batch if len(missing) == len(samples) else None
        with self.path.open("a", encoding="utf-8") as file:
            for entry in self._entries(vlm, missing, options, is_blind, label):
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
                file.flush()
                self._done[entry["id"]] = entry

    def _entries(
        self,
        vlm: DiffusionVlm,
        samples: Sequence[S],
        options: dict[str, Any],
        is_blind: bool,
        label: str | None,
    ) -> Iterator[Entry]:
        shown: list[tuple[S, dict[str, list[Any]], float]] = []
        for sample in samples:
            began = time.perf_counter()
            try:
                media = {} if is_blind else self.task.media(sample)
            except Exception as error:
                yield self._failure(sample, error)
                continue
            shown.append((sample, media, time.perf_counter() - began))
        if not shown:
            return
        try:
            answers = _ask(vlm, shown, options, label if len(shown) == len(samples) else None)
        except Exception:  # whatever goes wrong with one question must not cost the others
            for part in shown:
                try:
                    answer = _ask(vlm, [part], options, None)[0]
                except Exception as error:
                    yield self._failure(part[0], error)
                else:
                    yield self._success(part[0], answer)
            return
        for (sample, _, _), answer in zip(shown, answers, strict=True):
            yield self._success(sample, answer)

    def _success(self, sample: S, answer: Entry) -> Entry:
        text = answer.pop("text")
        return {
            **self.task.facts(sample),
            "answer": text,
            **self.task.judge(sample, text or ""),
            **answer,
        }

    def _failure(self, sample: S, error: Exception) -> Entry:
        return {
            **self.task.facts(sample),
            "answer": None,
            "is_right": False,
            "error": f"{type(error).__name__}: {error}",
            "flops": 0,
            "baseline_flops": 0,
            "forwards": {},
            "steps": 0,
            "seconds": 0.0,
            "batch": None,
        }

    def of(self, samples: Sequence[S]) -> list[Entry]:
        """The answers to `samples`, in their order."""
        return [self._done[sample.id] for sample in samples]


def _ask(
    vlm: DiffusionVlm,
    shown: Sequence[tuple[Any, dict[str, list[Any]], float]],
    options: dict[str, Any],
    batch: str | None,
) -> list[Entry]:
    """One `generate` call; text and cost per question, shared out evenly where rows share it.

    Each question draws from a seed of its own, made from the given one and its id, so that neither
    the batch nor another question has a part in what it draws.
    """
    seed = options.get("seed", vlm.generation_defaults.get("seed")) or 0
    if isinstance(seed, int):
        seed = [zlib.crc32(f"{seed}/{sample.id}".encode()) for sample, _, _ in shown]
    out = vlm.generate(
        [sample.question for sample, _, _ in shown],
        **{name: _of_rows(shown, name) for name in ("images", "videos")},
        **{**options, "seed": seed},
    )
    texts = out.text if isinstance(out.text, list) else [out.text]
    cost, kinds, steps = out.cost, _forwards_by_kind(out), _steps(out)
    heads, rows = _head_flops(out), out.trajectory.run["rows"]
    return [
        {
            "text": text,
            "seed": seed[row],
            "flops": cost.row_flops[row],
            "head_flops": heads[row],
            "vision_flops": cost.vision_flops / len(shown),
            "baseline_flops": cost.row_baseline_flops[row],
            "baseline_forwards": cost.row_baseline_forwards[row],
            "prompt_length": cost.prompt_lengths[row],
            "visual_tokens": cost.visual_tokens[row],
            "frames": sum(len(video["indices"]) for video in rows[row]["videos"]),
            "forwards": kinds[row],
            "steps": steps[row],
            "seconds": cost.seconds_decode / len(shown),
            "seconds_prefill": cost.seconds_prefill / len(shown),
            "seconds_media": seconds,
            "batch": batch,
            "batch_seconds": cost.seconds_decode,
        }
        for row, (text, (_, _, seconds)) in enumerate(zip(texts, shown, strict=True))
    ]


def _of_rows(
    shown: Sequence[tuple[Any, dict[str, list[Any]], float]], name: str
) -> list[Any] | None:
    rows = [media.get(name) for _, media, _ in shown]
    return rows if any(rows) else None


def _forwards_by_kind(out: Output) -> list[dict[str, int]]:
    """Forwards of each row, keyed `"VIEW/kind"`."""
    counts: list[Counter[str]] = [Counter() for _ in out.cost.row_flops]
    for step in out.trajectory.steps:
        for forward in step.forwards:
            for row in forward.rows:
                counts[row][f"{forward.view}/{forward.kind}"] += 1
    return [dict(count) for count in counts]


def _head_flops(out: Output) -> list[int]:
    """Head FLOPs of each row; a forward's are proportional to the positions that a row gave it."""
    totals = [0] * len(out.cost.row_flops)
    for step in out.trajectory.steps:
        for forward in step.forwards:
            each = forward.head_flops // max(1, sum(forward.head_positions))
            for row, positions in zip(forward.rows, forward.head_positions, strict=True):
                totals[row] += each * positions
    return totals


def _steps(out: Output) -> list[int]:
    """Steps that each row took."""
    totals = [0] * len(out.cost.row_flops)
    for step in out.trajectory.steps:
        totals = [
            total + active for total, active in zip(totals, step.active.tolist(), strict=True)
        ]
    return totals
