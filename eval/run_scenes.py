"""Accuracy on held-out scene questions, by kind.

Results are appended to the file as they come, and an interrupted run resumes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dlm_decode.errors import InvalidInputError
from dlm_decode.eval.scene_questions import SceneSample, heldout_samples, score
from dlm_decode.eval.scenes import DATA_VERSION
from dlm_decode.registry import describe

if TYPE_CHECKING:
    from dlm_decode.vlm import DiffusionVlm

__all__ = ["ask_batch", "batches", "evaluate_scenes", "read_done", "settings_of", "summarise"]


def evaluate_scenes(
    vlm: DiffusionVlm,
    options: dict[str, Any],
    *,
    output: str | Path,
    limit: int = 1000,
    batch: int = 32,
    is_blind: bool = False,
) -> dict[str, Any]:
    """Asks the first `limit` held-out questions that `output` does not answer yet.

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
    if limit < 1 or batch < 1:
        raise InvalidInputError(f"limit and batch must be at least 1, got {limit} and {batch}.")
    output = Path(output)
    settings = settings_of(vlm, options, is_blind)
    done = read_done(output, settings)
    samples = [sample for sample in heldout_samples(limit) if sample.id not in done]
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as file:
        if not done:
            file.write(json.dumps({"settings": settings}) + "\n")
        for part in tqdm(
            list(batches(samples, batch)), desc="questions", unit="batch", disable=not samples
        ):
            for entry in ask_batch(vlm, part, options, is_blind):
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
                done[entry["id"]] = entry
            file.flush()
    wanted = {sample.id for sample in heldout_samples(limit)}
    return {
        "settings": settings,
        **summarise([entry for entry in done.values() if entry["id"] in wanted]),
    }


def summarise(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Accuracy in all and by kind, cost relative to the baseline sampler, forwards per question.

    Args:
        entries: lines of an output file, without the settings.
    """
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
    }


def settings_of(vlm: DiffusionVlm, options: dict[str, Any], is_blind: bool) -> dict[str, Any]:
    """What an output file depends on, as its first line says."""
    from dlm_decode import samplers, vision

    named = {
        key: value
        for key, value in options.items()
        if value is not None and key not in ("sampler", "stages")
    }
    return {
        "model": vlm.name,
        "data": DATA_VERSION,
        "dtype": str(vlm.model.dtype).removeprefix("torch."),
        "sampler": describe(samplers.make(options.get("sampler", "baseline"))),
        "stages": [describe(vision.make(stage)) for stage in options.get("stages") or ()],
        "options": named,
        "is_blind": is_blind,
    }


def read_done(path: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Answers that the file holds.

    An incomplete last line, as a killed run leaves it, is cut off.
    """
    if not path.exists() or not path.read_text(encoding="utf-8").strip():
        return {}
    kept, entries = [], []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
        kept.append(line)
    if not entries or entries[0].get("settings") != json.loads(json.dumps(settings)):
        raise InvalidInputError(
            f"{str(path)!r} was written with other settings; choose another --output or remove it."
        )
    path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    return {entry["id"]: entry for entry in entries[1:]}


def batches(samples: Sequence[SceneSample], size: int) -> Iterator[Sequence[SceneSample]]:
    """`samples` in runs of `size`."""
    for start in range(0, len(samples), size):
        yield samples[start : start + size]


def ask_batch(
    vlm: DiffusionVlm, samples: Sequence[SceneSample], options: dict[str, Any], is_blind: bool
) -> Iterator[dict[str, Any]]:
    """One `generate` call; yields an output line per question, seconds shared out evenly."""
    images = None if is_blind else [sample.image for sample in samples]
    out = vlm.generate([sample.question for sample in samples], images=images, **options)
    texts = out.text if isinstance(out.text, list) else [out.text]
    for row, (sample, text) in enumerate(zip(samples, texts, strict=True)):
        yield {
            "id": sample.id,
            "kind": sample.kind,
            "question": sample.question,
            "expected": sample.answer,
            "answer": text,
            "is_right": score(sample, text or ""),
            "flops": out.cost.row_flops[row],
            "baseline_flops": out.cost.row_baseline_flops[row],
            "forwards": out.cost.row_forwards[row],
            "seconds": out.cost.seconds_decode / len(samples),
        }
