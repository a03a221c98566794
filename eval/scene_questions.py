"""Questions about scenes, with their answers and how an answer is scored."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from PIL import Image

from dlm_decode.eval.kinds import LETTERS, first_of
from dlm_decode.eval.scenes import (
    CELL_NAMES,
    COLOURS,
    SHAPES,
    SIZES,
    Scene,
    SceneObject,
    Split,
    generate_scene,
)

__all__ = [
    "ALL_KINDS",
    "EXTRA_KINDS",
    "KINDS",
    "SceneSample",
    "ask",
    "first_samples",
    "heldout_samples",
    "options_of",
    "practice_choice",
    "scene_samples",
    "score",
    "vocabulary",
]

REFUSAL = "i can not tell , this is not a scene i know ."
_NUMBERS = ("no", "1", "2", "3", "4", "5")


@dataclass(frozen=True)
class SceneSample:
    """One question about one picture.

    Attributes:
        question: as a user would type it, in lower case.
        answer: the expected response.
        kind: key of `KINDS` or `EXTRA_KINDS`, or `"photo"`.
        form: the kind whose phrasing the question has; differs from `kind` for `"photo"` only.
        scene: the picture.
    """

    question: str
    answer: str
    kind: str
    form: str
    scene: Scene = field(repr=False)

    @property
    def image(self) -> Image.Image:
        """The picture."""
        return self.scene.image

    @property
    def id(self) -> str:
        """Stable name of the sample."""
        return f"{self.scene.split}-{self.scene.seed}-{self.kind}"


def score(sample: SceneSample, text: str) -> bool:
    """Whether `text` answers the question.

    A choice needs the letter, existence yes or no, a list every object once in any order, any
    other kind every word.
    """
    given, wanted = _words(text), _words(sample.answer)
    if sample.kind in ("choice", "exists"):
        return given[:1] == wanted[:1]
    if sample.kind == "list":
        return _items(text) == _items(sample.answer)
    return given == wanted


def _items(text: str) -> list[list[str]]:
    """The words of each part between commas, in a fixed order."""
    return sorted(_words(part) for part in text.split(","))


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z]+|[0-9]", text.lower())


def _name(item: SceneObject, *, size: bool = False, colour: bool = True) -> str:
    parts = [item.size if size else "", item.colour if colour else "", item.name]
    return " ".join(part for part in parts if part)


def _describe(scene: Scene, rng: random.Random) -> tuple[str, str]:
    question = rng.choice(
        (
            "describe the picture .",
            "describe the image .",
            "describe the image in detail .",
            "what is in the picture ?",
            "what is in this image ?",
            "what do you see ?",
        )
    )
    return question, _listed(scene.objects)


def _list(scene: Scene, rng: random.Random) -> tuple[str, str]:
    """As a description, in an order that nobody can foresee: what comes next depends on the rest.

    The first look gives the words of every position by themselves, and most pairs of them do not
    belong together; only looks that come after some were committed can tell.
    """
    question = rng.choice(
        (
            "which objects are in the picture ?",
            "which objects do you see ?",
            "which objects can you see in the picture ?",
        )
    )
    return question, _listed(rng.sample(scene.objects, len(scene.objects)))


def _listed(items: Sequence[SceneObject]) -> str:
    return " , ".join(f"{_name(item, size=True)} {item.place}" for item in items) + " ."


def _unique(scene: Scene, key: Callable[[SceneObject], str]) -> list[SceneObject]:
    keys = [key(item) for item in scene.objects]
    return [item for item, own in zip(scene.objects, keys, strict=True) if keys.count(own) == 1]


def _absent(
    scene: Scene, rng: random.Random, key: Callable[[SceneObject], str], make: Callable[[], str]
) -> str:
    present = {key(item) for item in scene.objects}
    while True:
        name = make()
        if name not in present:
            return name


def _any_name(rng: random.Random) -> str:
    return rng.choice(SHAPES) if rng.random() < 0.6 else str(rng.randrange(10))


def _colour(scene: Scene, rng: random.Random) -> tuple[str, str] | None:
    key = (
        (lambda o: o.name) if rng.random() < 0.6 else (lambda o: _name(o, size=True, colour=False))
    )
    found = _unique(scene, key)
    if rng.random() < 0.1:
        name = _absent(scene, rng, lambda o: o.name, lambda: _any_name(rng))
        answer = f"there is no {name} ."
    elif found:
        item = rng.choice(found)
        name = key(item)
        answer = f"the {name} is {item.colour} ."
    else:
        return None
    word = rng.choice(("colour", "color"))
    return rng.choice(
        (
            f"what {word} is the {name} ?",
            f"what is the {word} of the {name} ?",
            f"which {word} does the {name} have ?",
        )
    ), answer


def _where(scene: Scene, rng: random.Random) -> tuple[str, str] | None:
    found = _unique(scene, _name)
    if rng.random() < 0.1:
        name = _absent(scene, rng, _name, lambda: f"{rng.choice(list(COLOURS))} {_any_name(rng)}")
        answer = f"there is no {name} ."
    elif found:
        item = rng.choice(found)
        name = _name(item)
        answer = f"the {name} is at the {item.place} ."
    else:
        return None
    return rng.choice(
        (
            f"where is the {name} ?",
            f"where can you see the {name} ?",
            f"where do you see the {name} ?",
        )
    ), answer


def _cell(scene: Scene, rng: random.Random) -> tuple[str, str]:
    cell = rng.randrange(9) if rng.random() < 0.2 else rng.choice(scene.objects).cell
    place = CELL_NAMES[cell]
    here = [item for item in scene.objects if item.cell == cell]
    what = f"a {_name(here[0], size=True)}" if here else "nothing"
    return rng.choice(
        (
            f"what is at the {place} ?",
            f"what is in the {place} ?",
            f"what do you see at the {place} ?",
        )
    ), f"{what} is at the {place} ."


def _digit(scene: Scene, rng: random.Random) -> tuple[str, str] | None:
    digits = [item for item in scene.objects if item.is_digit]
    if not digits:
        return None
    item = rng.choice(digits)
    if len(digits) == 1 and rng.random() < 0.4:
        question = rng.choice(
            (
                "which digit is in the picture ?",
                "what number do you see ?",
                "which digit do you see ?",
            )
        )
        return question, f"the digit is {item.name} ."
    question = rng.choice(
        (f"which digit is at the {item.place} ?", f"what number is at the {item.place} ?")
    )
    return question, f"the digit at the {item.place} is {item.name} ."


def _count(scene: Scene, rng: random.Random) -> tuple[str, str]:
    pick = rng.random()
    if pick < 0.35:
        noun, number = "object", len(scene.objects)
    elif pick < 0.55:
        noun, number = "digit", sum(item.is_digit for item in scene.objects)
    elif pick < 0.8:
        colour = (
            rng.choice(scene.objects).colour if rng.random() < 0.7 else rng.choice(list(COLOURS))
        )
        noun, number = f"{colour} object", sum(item.colour == colour for item in scene.objects)
    else:
        shape = rng.choice(SHAPES)
        noun, number = shape, sum(item.name == shape for item in scene.objects)
    plural = _plural(noun)
    question = rng.choice(
        (
            f"how many {plural} are there ?",
            f"how many {plural} do you see ?",
            f"how many {plural} are in the picture ?",
        )
    )
    verb, form = ("is", noun) if number == 1 else ("are", plural)
    return question, f"there {verb} {_NUMBERS[number]} {form} ."


def _plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")


def _exists(scene: Scene, rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        name = _name(rng.choice(scene.objects))
        answer = f"yes , there is a {name} ."
    else:
        name = _near_miss(scene, rng)
        answer = f"no , there is no {name} ."
    return rng.choice(
        (
            f"is there a {name} ?",
            f"do you see a {name} ?",
            f"is there a {name} in the picture ?",
            f"can you see a {name} ?",
        )
    ), answer


def _near_miss(scene: Scene, rng: random.Random) -> str:
    """Something that is not there, often with a colour or a form that is."""

    def make() -> str:
        item = rng.choice(scene.objects)
        pick = rng.random()
        colour = item.colour if pick < 0.4 else rng.choice(list(COLOURS))
        return f"{colour} {item.name if 0.4 <= pick < 0.8 else _any_name(rng)}"

    return _absent(scene, rng, _name, make)


def _choice(scene: Scene, rng: random.Random, num_options: int = len(LETTERS)) -> tuple[str, str]:
    right = _name(rng.choice(scene.objects))
    wrong: set[str] = set()
    while len(wrong) < num_options - 1:
        wrong.add(_near_miss(scene, rng))
    options = [right, *sorted(wrong)]
    rng.shuffle(options)
    letter = LETTERS[options.index(right)]
    listing = " ".join(f"{mark} ) {option}" for mark, option in zip(LETTERS, options, strict=False))
    return f"which of these is in the picture ? {listing}", f"{letter} ) {right} ."


def options_of(question: str) -> list[str]:
    """The options of a choice, in the order of their letters."""
    return re.findall(rf"[{LETTERS}] \) (.+?)(?= [{LETTERS}] \)|$)", question)


KINDS: dict[str, Callable[[Scene, random.Random], tuple[str, str] | None]] = {
    "describe": _describe,
    "colour": _colour,
    "where": _where,
    "cell": _cell,
    "digit": _digit,
    "count": _count,
    "exists": _exists,
    "choice": _choice,
}
"""Kinds of questions about scenes.

A picture that is no scene is asked any of them, as kind `"photo"`.
"""

EXTRA_KINDS: dict[str, Callable[[Scene, random.Random], tuple[str, str] | None]] = {"list": _list}
"""Kinds that are asked only where they are named: the others' accuracy does not contain them."""

ALL_KINDS = (*KINDS, "photo", *EXTRA_KINDS)


def ask(scene: Scene, kind: str, rng: random.Random) -> SceneSample | None:
    """A question of one kind, or `None` where the scene allows none.

    Args:
        scene: the picture.
        kind: key of `KINDS` or `EXTRA_KINDS`, or `"photo"` for a picture that is no scene.
        rng: draws the phrasing and the subject.
    """
    if kind == "photo":
        other = generate_scene(rng.randrange(10**6), scene.split, photo_share=0.0)
        form = rng.choice(list(KINDS))
        asked = KINDS[form](other, rng)
        return None if asked is None else SceneSample(asked[0], REFUSAL, kind, form, scene)
    made = (KINDS | EXTRA_KINDS)[kind](scene, rng)
    return None if made is None else SceneSample(*made, kind, kind, scene)


def practice_choice(scene: Scene, rng: random.Random) -> SceneSample:
    """A choice among two to four options: with fewer of them, looking them up is learnt sooner."""
    num_options = rng.choice((2, 3, 3, 4, 4, 4))
    question, answer = _choice(scene, rng, num_options)
    return SceneSample(question, answer, "choice", "choice", scene)


def scene_samples(seed: int, split: Split, extra: Sequence[str] = ()) -> list[SceneSample]:
    """One question of every kind that the scene allows, the same ones each time.

    Args:
        seed: of the scene.
        split: of the scene.
        extra: keys of `EXTRA_KINDS` to ask as well; they change no other question.
    """
    scene = generate_scene(seed, split)
    rng = random.Random(f"questions/{split}/{seed}")
    asked = [ask(scene, kind, rng) for kind in (["photo"] if scene.is_photo else KINDS)]
    for kind in extra if not scene.is_photo else ():
        asked.append(ask(scene, kind, random.Random(f"questions/{kind}/{split}/{seed}")))
    return [sample for sample in asked if sample is not None]


def first_samples(
    count: int, kinds: Sequence[str] | None = None, *, split: Split = "heldout"
) -> Iterator[SceneSample]:
    """The first `count` questions of a split, scene after scene.

    Args:
        count: how many.
        kinds: only these; every key of `KINDS` (and `"photo"`) by default.
        split: of the scenes.

    Raises:
        UnknownNameError: a kind that does not exist.
        InvalidInputError: no kind at all.
    """
    extra = [kind for kind in kinds or () if kind in EXTRA_KINDS]
    return first_of(lambda seed: scene_samples(seed, split, extra), count, kinds, ALL_KINDS, split)


def heldout_samples(count: int, kinds: Sequence[str] | None = None) -> Iterator[SceneSample]:
    """The first `count` held-out questions; see `first_samples`."""
    return first_samples(count, kinds)


def vocabulary() -> list[str]:
    """Every word that questions and answers use, sorted."""
    words = {*SHAPES, *COLOURS, *SIZES, *LETTERS, *_NUMBERS, *map(str, range(10)), *REFUSAL.split()}
    words |= {word for place in CELL_NAMES for word in place.split()}
    words |= {_plural(shape) for shape in SHAPES} | {"objects", "object", "digits", "digit"}
    rng = random.Random(0)
    for seed in range(300):
        for sample in scene_samples(seed, "train"):
            words |= {*sample.question.split(), *sample.answer.split()}
        scene = generate_scene(seed, "train", photo_share=0.0)
        for kind in KINDS:
            if made := KINDS[kind](scene, rng):
                words |= {word for text in made for word in text.split()}
    return sorted(words)
