"""LOWN's measurements, from trajectories whose steps record both views.

Such trajectories come from `generate(..., probe="packed")`. The functions here are pure: they read
records and count. Source of all of them: LOWN (arXiv 2610.36671), agreement protocol and
certificate reliability.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from dlm_decode.errors import InvalidInputError
from dlm_decode.eval.run_scenes import SCENES, Scenes, question_batches
from dlm_decode.eval.runner import settings_of
from dlm_decode.record import read_records

if TYPE_CHECKING:
    from dlm_decode.vlm import DiffusionVlm

__all__ = [
    "ProbedStep",
    "Response",
    "agreement",
    "disagreement_map",
    "draw_map",
    "read_responses",
    "record_scenes",
    "reliability",
    "render",
    "report_of",
    "responses_of",
]

_MAX_AGE = 4


@dataclass(frozen=True)
class ProbedStep:
    """One step of one response; positions count from the start of the response.

    Attributes:
        full: what FULL would propose, by open position.
        text: what TEXT_ONLY would propose.
        commits: token and reason by committed position.
        eligible: positions of the block that were open.
        is_full: the step ran FULL.
    """

    full: dict[int, int]
    text: dict[int, int]
    commits: dict[int, tuple[int, str]]
    eligible: frozenset[int]
    is_full: bool

    def is_image_dependent(self) -> bool:
        """The views disagree on a position that the step commits."""
        return any(self.full[position] != self.text[position] for position in self.commits)


@dataclass(frozen=True)
class Response:
    """The steps of one response, and what costs are relative to.

    Attributes:
        steps: in order.
        length: canvas length.
        padding: ids that fill the canvas behind an answer.
        full_flops: decoder FLOPs of one forward with visual tokens.
        text_flops: of one without them.
        baseline_flops: of the baseline sampler, run to its last step.
    """

    steps: tuple[ProbedStep, ...]
    length: int
    padding: frozenset[int]
    full_flops: float
    text_flops: float
    baseline_flops: float


def read_responses(paths: Iterable[str | Path]) -> list[Response]:
    """The responses of trajectory files that have visual tokens; others have nothing to measure.

    Raises:
        InvalidInputError: no such file, no trajectory, not finished, or recorded without probes.
    """
    responses = []
    for path in paths:
        try:
            responses += responses_of(read_records(path))
        except InvalidInputError as error:
            raise InvalidInputError(f"{str(path)!r}: {error}") from None
    return responses


def responses_of(records: Sequence[dict[str, Any]]) -> list[Response]:
    """The responses with visual tokens in the records of one trajectory.

    Raises:
        InvalidInputError: recorded without probes, or not finished.
    """
    run, end = records[0], records[-1]
    if "probe" not in run:
        raise InvalidInputError(
            "the trajectory holds no probes; record it with generate(..., probe='packed') or "
            "dlm-decode generate --probe packed."
        )
    if end["type"] != "end":
        raise InvalidInputError("the trajectory is not finished: it has no 'end' record.")
    settings = run["settings"]
    width = settings["block_length"] or settings["gen_length"]
    steps: dict[int, list[ProbedStep]] = {row: [] for row in range(len(run["rows"]))}
    for record in records[1:-1]:
        for row in record["rows"]:
            views = {
                name: {position: token for position, token, *_ in entries}
                for name, entries in row["probes"].items()
            }
            steps[row["row"]].append(
                ProbedStep(
                    full=views["FULL"],
                    text=views["TEXT_ONLY"],
                    commits={
                        position: (token, reason)
                        for position, token, _, _, reason in row["commits"]
                    },
                    eligible=frozenset(
                        position for position in views["FULL"] if position // width == row["block"]
                    ),
                    is_full=row["route"] == "FULL",
                )
            )
    return [
        Response(
            steps=tuple(steps[row]),
            length=settings["gen_length"],
            padding=frozenset(run["padding_ids"]),
            full_flops=run["probe"]["flops"]["FULL"][row],
            text_flops=run["probe"]["flops"]["TEXT_ONLY"][row],
            baseline_flops=end["cost"]["rows"][row]["baseline_flops"],
        )
        for row, facts in enumerate(run["rows"])
        if facts["visual_tokens"]
    ]


def _share(part: float, total: float) -> float | None:
    return part / total if total else None


def agreement(responses: Sequence[Response]) -> dict[str, Any]:
    """The agreement protocol; meant for trajectories that FULL decided, as the baseline's.

    Returns:
        Shares, `None` where nothing was counted:
        `agreement`: of committed tokens, those that both views propose;
        `agreement_without_padding`: the same, padding left out;
        `image_dependent_steps`: of steps, those that commit a token on which the views disagree;
        `already_top`: of tokens committed after the first step, those that FULL had proposed at
        their position in some earlier step; `already_top_at_first`: in the first step;
        `oracle_cost`: relative cost if FULL ran in the first step and in image-dependent ones, and
        TEXT_ONLY in the others;
        and the counts `tokens`, `steps`, `responses`.
    """
    count: Counter[str] = Counter()
    oracle = baseline = 0.0
    for response in responses:
        baseline += response.baseline_flops
        seen: dict[int, set[int]] = {}
        for index, step in enumerate(response.steps):
            is_dependent = step.is_image_dependent()
            count["steps"] += 1
            count["dependent"] += is_dependent
            needs_full = is_dependent or index == 0
            oracle += response.full_flops if needs_full else response.text_flops
            for position, (token, _) in step.commits.items():
                agrees = step.full[position] == step.text[position]
                count["tokens"] += 1
                count["agreeing"] += agrees
                if token not in response.padding:
                    count["words"] += 1
                    count["agreeing_words"] += agrees
                if index:
                    count["later"] += 1
                    count["already"] += token in seen[position]
                    count["first"] += response.steps[0].full[position] == token
            for position, token in step.full.items():
                seen.setdefault(position, set()).add(token)
    return {
        "agreement": _share(count["agreeing"], count["tokens"]),
        "agreement_without_padding": _share(count["agreeing_words"], count["words"]),
        "image_dependent_steps": _share(count["dependent"], count["steps"]),
        "already_top": _share(count["already"], count["later"]),
        "already_top_at_first": _share(count["first"], count["later"]),
        "oracle_cost": _share(oracle, baseline),
        "tokens": count["tokens"],
        "steps": count["steps"],
        "responses": len(responses),
    }


def disagreement_map(responses: Sequence[Response]) -> dict[str, Any]:
    """Where the views propose different tokens.

    Returns:
        `open`: `(steps, positions)` nested lists, responses in which the position was open at that
        step; `disagreeing`: those among them on which the views disagree; `per_step`: the share of
        open positions that disagree, by step.
    """
    num_steps = max((len(response.steps) for response in responses), default=0)
    length = max((response.length for response in responses), default=0)
    is_open = np.zeros((num_steps, length), dtype=int)
    disagreeing = np.zeros_like(is_open)
    for response in responses:
        for index, step in enumerate(response.steps):
            for position, token in step.full.items():
                is_open[index, position] += 1
                disagreeing[index, position] += step.text[position] != token
    totals = zip(disagreeing.sum(axis=1).tolist(), is_open.sum(axis=1).tolist(), strict=True)
    return {
        "open": is_open.tolist(),
        "disagreeing": disagreeing.tolist(),
        "per_step": [_share(part, total) for part, total in totals],
    }


def draw_map(found: dict[str, Any], path: str | Path) -> Path:
    """Draws a `disagreement_map`; the suffix of `path` (.png, .svg) decides the format.

    Raises:
        InvalidInputError: matplotlib is not installed, or the map is of no step.
    """
    if not found["open"]:
        raise InvalidInputError("no response has visual tokens, so there is no map to draw.")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidInputError("plots need matplotlib; install dlm-decode[plot].") from None
    is_open, disagreeing = (np.array(found[name], dtype=float) for name in ("open", "disagreeing"))
    share = np.divide(disagreeing, is_open, out=np.full_like(is_open, np.nan), where=is_open > 0)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(share, aspect="auto", origin="lower", cmap="magma", vmin=0, vmax=1)
    axes.set_xlabel("position in the response")
    axes.set_ylabel("step")
    figure.colorbar(image, label="share of responses where FULL and TEXT_ONLY disagree")
    path = Path(path)
    figure.savefig(path, dpi=150)
    return path


def reliability(responses: Sequence[Response]) -> dict[str, Any]:
    """How far an anchor can be trusted; meant for trajectories that LOWN decided.

    The anchor before a step is what FULL proposed in the latest step that ran FULL; its age is the
    number of steps since.

    Returns:
        Shares, `None` where nothing was counted; lists are by age 1 to 4:
        `coverage`: of the eligible positions of steps with an anchor of that age, those accepted
        from it without FULL;
        `certified`: those on which TEXT_ONLY agrees with the anchor, accepted or not;
        `epsilon`: of open positions, those at which a fresh FULL forward proposes another token
        than FULL did that many steps ago;
        `epsilon_certified`: the same where TEXT_ONLY still agrees with the old token;
        `acceptance_error`: of accepted tokens, those that a fresh FULL forward would change;
        `accepted_by_age`: of accepted tokens, the share by age, the last entry for all older ones;
        and the counts `accepted`, `responses`.
    """
    count: Counter[tuple[str, int]] = Counter()
    for response in responses:
        last_full = None
        for index, step in enumerate(response.steps):
            for age in range(1, min(_MAX_AGE, index) + 1):
                old = response.steps[index - age].full
                for position, token in step.full.items():
                    changed = old[position] != token
                    is_certified = step.text[position] == old[position]
                    count["open", age] += 1
                    count["changed", age] += changed
                    count["open_certified", age] += is_certified
                    count["changed_certified", age] += is_certified and changed
            if last_full is not None:
                age = min(index - last_full, _MAX_AGE + 1)
                anchor = response.steps[last_full].full
                count["eligible", age] += len(step.eligible)
                count["certified", age] += sum(
                    step.text[position] == anchor[position] for position in step.eligible
                )
                if not step.is_full:
                    count["accepted", age] += len(step.commits)
                    count["wrong", 0] += sum(
                        step.full[position] != token
                        for position, (token, _) in step.commits.items()
                    )
            if step.is_full:
                last_full = index
    ages = range(1, _MAX_AGE + 1)
    accepted = sum(number for (name, _), number in count.items() if name == "accepted")

    def by_age(part: str, total: str) -> list[float | None]:
        return [_share(count[part, age], count[total, age]) for age in ages]

    return {
        "coverage": by_age("accepted", "eligible"),
        "certified": by_age("certified", "eligible"),
        "epsilon": by_age("changed", "open"),
        "epsilon_certified": by_age("changed_certified", "open_certified"),
        "acceptance_error": _share(count["wrong", 0], accepted),
        "accepted_by_age": [
            _share(count["accepted", age], accepted) for age in (*ages, _MAX_AGE + 1)
        ],
        "accepted": accepted,
        "responses": len(responses),
    }


def report_of(responses: Sequence[Response]) -> dict[str, Any]:
    """All three measurements, by name."""
    return {
        "agreement": agreement(responses),
        "reliability": reliability(responses),
        "map": disagreement_map(responses),
    }


def render(report: dict[str, Any]) -> str:
    """The shares of a report as a table for a terminal; the map is left out."""
    lines = []
    for part in ("agreement", "reliability"):
        lines.append(f"{part}:")
        for name, value in report[part].items():
            values = value if isinstance(value, list) else [value]
            lines.append(f"  {name:<28}{'  '.join(map(_shown, values))}")
    return "\n".join(lines)


def _shown(value: float | int | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if isinstance(value, float) else str(value)


def record_scenes(
    vlm: DiffusionVlm,
    options: dict[str, Any],
    folder: str | Path,
    *,
    limit: int = 200,
    batch: int = 32,
    positions: str = "packed",
    task: Scenes = SCENES,
) -> list[Path]:
    """Records probed trajectories of held-out questions, one file per batch.

    Args:
        vlm: the model.
        options: arguments of `generate`: sampler, stages, lengths.
        folder: of the files; finished ones are kept, so a run resumes.
        limit: number of questions.
        batch: questions per file.
        positions: rotary positions of the probed TEXT_ONLY view.
        task: what is asked.

    Raises:
        InvalidInputError: a limit or batch below 1, or a folder that other settings wrote.
    """
    parts = question_batches(limit, batch, task)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {**settings_of(vlm, task, options), "batch": batch, "positions": positions}
    _claim(folder / "settings.json", settings)
    paths = []
    for number, part in enumerate(tqdm(parts)):
        path = folder / f"{number:05d}.jsonl"
        paths.append(path)
        if _is_finished(path, len(part)):
            continue
        vlm.generate(
            [sample.question for sample in part],
            images=[sample.image for sample in part],
            probe=positions,
            track=f"jsonl:{path}",
            **options,
        )
    return paths


def _claim(path: Path, settings: dict[str, Any]) -> None:
    text = json.dumps(settings, indent=2) + "\n"
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise InvalidInputError(
            f"{str(path.parent)!r} was written with other settings; choose another --output or "
            "remove it."
        )
    fresh = path.with_name(path.name + ".tmp")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)  # in one piece: a run that is killed here can be resumed


def _is_finished(path: Path, num_rows: int) -> bool:
    if not path.exists():
        return False
    try:
        records = read_records(path)
    except InvalidInputError:  # a run that was killed in its first line
        return False
    return records[-1]["type"] == "end" and len(records[0]["rows"]) == num_rows
