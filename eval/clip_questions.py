"""Multiple-choice questions about clips, with their answers and how an answer is scored."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from PIL import Image

from dlm_decode.eval.clips import (
    MAX_OBJECTS,
    MOTIONS,
    NUM_STEPS,
    Clip,
    ClipObject,
    generate_clip,
)
from dlm_decode.eval.kinds import LETTERS, first_of
from dlm_decode.eval.scenes import CELL_NAMES, CELL_SIZE, COLOURS, SHAPES, Split

__all__ = [
    "KINDS",
    "ClipSample",
    "ask",
    "clip_samples",
    "clip_vocabulary",
    "first_samples",
    "practice",
    "score",
]


@dataclass(frozen=True)
class ClipSample:
    """One question about one clip.

    Attributes:
        question: as a user would type it, in lower case, its options included.
        answer: the expected response: the right option as it is listed, then a sentence.
        kind: key of `KINDS`; of practice questions, see `practice`, `"place"` as well.
        clip: what is asked about.
        options: texts of the options, the first is a; empty for a question without any.
    """

    question: str
    answer: str
    kind: str
    clip: Clip = field(repr=False)
    options: tuple[str, ...] = ()

    @property
    def video(self) -> list[Image.Image]:
        """The clip's frames."""
        return self.clip.frames()

    @property
    def id(self) -> str:
        """Stable name of the sample."""
        return f"{self.clip.split}-{self.clip.seed}-{self.kind}"


def score(sample: ClipSample, text: str) -> bool:
    """Whether `text` answers the question.

    The letter that begins it must be the right one; without options, every word must be right.
    """
    given, wanted = _words(text), _words(sample.answer)
    return given[:1] == wanted[:1] if sample.options else given == wanted


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+|[0-9]", text.lower())


@dataclass(frozen=True)
class _Asked:
    """A question before its options are written down: the right one, and others in random order."""

    question: str
    sentence: str
    right: str
    wrong: Sequence[str]


def _name(item: ClipObject) -> str:
    return f"{item.colour} {item.name}"


def _movement(clip: Clip, rng: random.Random) -> _Asked:
    item = rng.choice(clip.objects)
    name = _name(item)
    question = rng.choice((f"which way does the {name} move ?", f"how does the {name} move ?"))
    others = [motion for motion in MOTIONS if motion != item.motion]
    rng.shuffle(others)
    return _Asked(question, f"the {name} moves {item.motion}", item.motion, others)


def _order(clip: Clip, rng: random.Random) -> _Asked | None:
    ends = []
    for word, pick in (("first", min), ("last", max)):
        step = pick(item.first for item in clip.objects)
        found = [item for item in clip.objects if item.first == step]
        if len(found) == 1:
            ends.append((word, found[0]))
    if len(clip.objects) < 2 or not ends:
        return None
    word, item = rng.choice(ends)
    question = rng.choice((f"what appears {word} ?", f"which object appears {word} ?"))
    others = [_name(other) for other in clip.objects if other is not item]
    present = {other.colour for other in clip.objects}
    absent = [f"{colour} {rng.choice(SHAPES)}" for colour in COLOURS if colour not in present]
    rng.shuffle(others)
    rng.shuffle(absent)
    return _Asked(question, f"the {_name(item)} appears {word}", _name(item), [*others, *absent])


def _count(clip: Clip, rng: random.Random) -> _Asked:
    number = str(len(clip.objects))
    question = rng.choice(
        ("how many objects are there in all ?", "how many objects appear in all ?")
    )
    others = [str(other) for other in range(1, MAX_OBJECTS + 1) if str(other) != number]
    rng.shuffle(others)
    return _Asked(question, f"there are {number} in all", number, others)


KINDS: dict[str, Callable[[Clip, random.Random], _Asked | None]] = {
    "movement": _movement,
    "order": _order,
    "count": _count,
}
"""Kinds of questions about clips; each has four options."""


def _with_options(
    asked: _Asked, kind: str, clip: Clip, rng: random.Random, num_options: int
) -> ClipSample:
    options = [asked.right, *asked.wrong[: num_options - 1]]
    rng.shuffle(options)
    listing = " ".join(f"{mark} ) {text}" for mark, text in zip(LETTERS, options, strict=False))
    answer = f"{LETTERS[options.index(asked.right)]} ) {asked.right} , {asked.sentence} ."
    return ClipSample(f"{asked.question} {listing}", answer, kind, clip, tuple(options))


def ask(clip: Clip, kind: str, rng: random.Random) -> ClipSample | None:
    """A question of one kind, or `None` where the clip allows none.

    Args:
        clip: what is asked about.
        kind: key of `KINDS`.
        rng: draws phrasing, subject and the order of the options.
    """
    asked = KINDS[kind](clip, rng)
    return None if asked is None else _with_options(asked, kind, clip, rng, len(LETTERS))


def practice(clip: Clip, kind: str, rng: random.Random) -> ClipSample | None:
    """A question that is easier than those of `ask`, for training.

    It has two to four options, or none. Kind `"place"` asks where something is when it appears, or
    at the end.
    """
    if kind == "place":
        return _place(clip, rng)
    asked = KINDS[kind](clip, rng)
    if asked is None:
        return None
    num_options = rng.choice((0, 0, 2, 3, 4, 4))
    if num_options == 0:
        return ClipSample(asked.question, f"{asked.sentence} .", kind, clip)
    return _with_options(asked, kind, clip, rng, num_options)


def _place(clip: Clip, rng: random.Random) -> ClipSample:
    item = rng.choice(clip.objects)
    word, (x, y) = rng.choice((("first", item.path[0]), ("last", item.path[-1])))
    cell = int(y // CELL_SIZE) * 3 + int(x // CELL_SIZE)
    question = f"where is the {_name(item)} {word} ?"
    return ClipSample(question, f"the {_name(item)} is at the {CELL_NAMES[cell]} .", "place", clip)


def clip_samples(seed: int, split: Split) -> list[ClipSample]:
    """One question of every kind that the clip allows, the same ones each time."""
    clip = generate_clip(seed, split)
    rng = random.Random(f"questions/{split}/{seed}")
    return [sample for kind in KINDS if (sample := ask(clip, kind, rng)) is not None]


def first_samples(
    count: int, kinds: Sequence[str] | None = None, *, split: Split = "heldout"
) -> Iterator[ClipSample]:
    """The first `count` questions of a split, clip after clip.

    Args:
        count: how many.
        kinds: only these; every kind by default.
        split: of the clips.

    Raises:
        UnknownNameError: a kind that does not exist.
        InvalidInputError: no kind at all.
    """
    return first_of(lambda seed: clip_samples(seed, split), count, kinds, tuple(KINDS), split)


def clip_vocabulary() -> list[str]:
    """Every word that questions and answers about clips use, sorted.

    The words of `/no_think`, which ends a prompt of VidLaDA, are among them.
    """
    words = {*SHAPES, *COLOURS, *MOTIONS, *LETTERS, *map(str, range(NUM_STEPS)), *"/_:)"}
    words |= {"no", "think"} | {word for place in CELL_NAMES for word in place.split()}
    rng = random.Random(0)
    for seed in range(60):
        clip = generate_clip(seed)
        for kind in (*KINDS, "place"):
            sample = practice(clip, kind, rng)
            if sample is not None:
                words |= {*sample.question.split(), *sample.answer.split()}
    return sorted(words)
