"""Accuracy on held-out scene questions, by kind.

Results are appended to the file as they come, and an interrupted run resumes.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dlm_decode.errors import InvalidInputError
from dlm_decode.eval.scene_questions import SceneSample, first_samples, score
from dlm_decode.eval.scenes import DATA_VERSION, Split
from dlm_decode.registry import describe
from dlm_decode.settings import Settings, resolve_settings

if TYPE_CHECKING:
    from dlm_decode.vlm import DiffusionVlm, Output

__all__ = [
    "Results",
    "batches",
    "evaluate_scenes",
    "question_batches",
    "settings_of",
    "summarise",
]


def evaluate_scenes(
    vlm: DiffusionVlm,
    options: dict[str, Any],
    *,
    output: str | Path,
    limit: int = 1000,
    batch: int = 32,
    is_blind: bool = False,
) -> dict[str, Any]:
    """Asks those of the first `limit` held-out questions that `output` does not answer yet.

    Args:
        vlm: the model.
        options: arguments of `generate`: sampler, stages, lengths.
        output: JSON lines; the first holds the settings, each further one a question.
        limit: number of questions.
        batch: questions per call; does not change any answer.
        is_blind: ask without the pictures.

    Returns:
        The report of `summarise`, with the settings.

    Raises:
        InvalidInputError: a limit or batch below 1, or an `output` that other settings wrote.
    """
    parts = question_batches(limit, batch)
    results = Results(output, settings_of(vlm, options, is_blind))
    for part in tqdm(parts, desc="questions", unit="batch"):
        results.answer(vlm, part, options, is_blind)
    return {
        "settings": results.settings,
        **summarise([entry for part in parts for entry in results.of(part)]),
    }


def summarise(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
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


def decoding_settings(vlm: DiffusionVlm, options: dict[str, Any]) -> Settings:
    """What `generate` decodes with, given these of its arguments."""
    methods = ("sampler", "stages", "cache")
    lengths = {key: value for key, value in options.items() if key not in methods}
    return resolve_settings(lengths, vlm.generation_defaults)


def settings_of(vlm: DiffusionVlm, options: dict[str, Any], is_blind: bool) -> dict[str, Any]:
    """What an output file depends on, as its first line says."""
    from dlm_decode import cache, samplers, vision

    policy = options.get("cache")
    return {
        "model": vlm.name,
        "weights": vlm.fingerprint,
        "data": DATA_VERSION,
        "dtype": str(vlm.model.dtype).removeprefix("torch."),
        "sampler": describe(samplers.make(options.get("sampler") or "baseline")),
        "stages": [describe(vision.make(stage)) for stage in options.get("stages") or ()],
        "cache": policy if policy in (None, "none") else describe(cache.make(policy)),
        "options": {
            name: describe(value) if is_dataclass(value) else value
            for name, value in vars(decoding_settings(vlm, options)).items()
        },
        "is_blind": is_blind,
    }


class Results:
    """Answers in a JSON-lines file: the settings, then a line per question, appended as they come.

    An incomplete last line, as a killed run leaves it, is cut off. Questions on which `generate`
    failed are asked again by the next run.

    Args:
        path: made with its folders if missing.
        settings: must be those of the file, if it holds any.

    Raises:
        InvalidInputError: the file was written with other settings.
    """

    def __init__(self, path: str | Path, settings: dict[str, Any]) -> None:
        self.path = Path(path)
        self.settings = settings
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._done = self._read()
        lines = [{"settings": settings}, *self._done.values()]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        fresh = self.path.with_name(self.path.name + ".tmp")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self.path)  # in one piece: a kill in between loses nothing

    def _read(self) -> dict[str, dict[str, Any]]:
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
        samples: Sequence[SceneSample],
        options: dict[str, Any],
        is_blind: bool = False,
        batch: str | None = None,
    ) -> None:
        """Asks those of `samples` that have no answer yet, in one `generate` call.

        If the call fails, they are asked one by one, and the lines of those that fail alone hold
        the error.

        Args:
            vlm: the model.
            samples: questions.
            options: arguments of `generate`.
            is_blind: ask without the pictures.
            batch: name of the batch, written beside its seconds if one call answers all of it.
        """
        missing = [sample for sample in samples if sample.id not in self._done]
        if not missing:
            return
        label = batch if len(missing) == len(samples) else None
        entries: Iterable[dict[str, Any]]
        try:
            entries = _ask(vlm, missing, options, is_blind, label)
        except Exception:  # whatever goes wrong with one question must not cost the others
            entries = (_ask_alone(vlm, sample, options, is_blind) for sample in missing)
        with self.path.open("a", encoding="utf-8") as file:
            for entry in entries:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
                self._done[entry["id"]] = entry

    def of(self, samples: Sequence[SceneSample]) -> list[dict[str, Any]]:
        """The answers to `samples`, in their order."""
        return [self._done[sample.id] for sample in samples]


def question_batches(
    limit: int, batch: int, split: Split = "heldout"
) -> list[Sequence[SceneSample]]:
    """The first `limit` questions of a split in runs of `batch`.

    Raises:
        InvalidInputError: a limit or batch below 1.
    """
    if limit < 1 or batch < 1:
        raise InvalidInputError(f"limit and batch must be at least 1, got {limit} and {batch}.")
    return batches(list(first_samples(limit, split=split)), batch)


def batches(samples: Sequence[SceneSample], size: int) -> list[Sequence[SceneSample]]:
    """`samples` in runs of `size`."""
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def _ask_alone(
    vlm: DiffusionVlm, sample: SceneSample, options: dict[str, Any], is_blind: bool
) -> dict[str, Any]:
    try:
        return _ask(vlm, [sample], options, is_blind, None)[0]
    except Exception as error:
        return {
            **_facts(sample),
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


def _ask(
    vlm: DiffusionVlm,
    samples: Sequence[SceneSample],
    options: dict[str, Any],
    is_blind: bool,
    batch: str | None,
) -> list[dict[str, Any]]:
    """One `generate` call; an output line per question, seconds shared out evenly.

    Each question draws from a seed of its own, made from the given one and its id, so that neither
    the batch nor another question has a part in what it draws.
    """
    images = None if is_blind else [sample.image for sample in samples]
    seed = options.get("seed", vlm.generation_defaults.get("seed")) or 0
    if isinstance(seed, int):
        seed = [zlib.crc32(f"{seed}/{sample.id}".encode()) for sample in samples]
    out = vlm.generate(
        [sample.question for sample in samples], images=images, **{**options, "seed": seed}
    )
    texts = out.text if isinstance(out.text, list) else [out.text]
    kinds, steps = _forwards_by_kind(out), _steps(out)
    return [
        {
            **_facts(sample),
            "answer": text,
            "is_right": score(sample, text or ""),
            "seed": seed[row],
            "flops": out.cost.row_flops[row],
            "baseline_flops": out.cost.row_baseline_flops[row],
            "forwards": kinds[row],
            "steps": steps[row],
            "seconds": out.cost.seconds_decode / len(samples),
            "batch": batch,
            "batch_seconds": out.cost.seconds_decode,
        }
        for row, (sample, text) in enumerate(zip(samples, texts, strict=True))
    ]


def _facts(sample: SceneSample) -> dict[str, Any]:
    return {
        "id": sample.id,
        "kind": sample.kind,
        "question": sample.question,
        "expected": sample.answer,
    }


def _forwards_by_kind(out: Output) -> list[dict[str, int]]:
    """Forwards of each row, keyed `"VIEW/kind"`."""
    counts: list[Counter[str]] = [Counter() for _ in out.cost.row_flops]
    for step in out.trajectory.steps:
        for forward in step.forwards:
            for row in forward.rows:
                counts[row][f"{forward.view}/{forward.kind}"] += 1
    return [dict(count) for count in counts]


def _steps(out: Output) -> list[int]:
    """Steps that each row took."""
    totals = [0] * len(out.cost.row_flops)
    for step in out.trajectory.steps:
        totals = [
            total + active for total, active in zip(totals, step.active.tolist(), strict=True)
        ]
    return totals
