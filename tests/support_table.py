"""Runs every sampler over every cache on every model, and prints what works as Markdown.

`python tests/support_table.py --write` puts the table into README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from golden_models import (
    lavida,
    lavida_dream,
    lavida_prompt,
    tiny56,
    tiny_prompt,
    vidlada,
    vidlada_prompt,
)

from dlm_decode import cache as caches
from dlm_decode import samplers
from dlm_decode.errors import DlmError
from dlm_decode.vlm import DiffusionVlm

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- support table -->\n", "<!-- end of support table -->\n"
LENGTHS = {"gen_length": 6, "steps": 6, "block_length": 3, "stop": False}
MODELS = {
    "LLaDA-V": (tiny56, lambda model: tiny_prompt(model, "single_list")),
    "LaViDa": (lavida, lambda model: lavida_prompt(model, "single_view")),
    "LaViDa-Dream": (lavida_dream, lambda model: lavida_prompt(model, "single_view")),
    "VidLaDA": (vidlada, lambda model: vidlada_prompt()),
}


def attempt(vlm: DiffusionVlm, prompt: dict, sampler: str, cache: str) -> str:
    """`"works"` when every position gets a token and the cache is used; else the reason."""
    try:
        out = vlm.generate(**prompt, sampler=sampler, cache=cache, **LENGTHS)
    except DlmError as error:
        return str(error)
    if out.sequences.shape[1] != LENGTHS["gen_length"]:
        return f"{out.sequences.shape[1]} of {LENGTHS['gen_length']} positions"
    if bool((out.sequences == vlm.model.special_ids.mask).any()):
        return "leaves masks"
    if (out.cost.kv_bytes > 0) != (cache != "none"):
        return "does not keep what it should" if cache != "none" else "keeps what it should not"
    return "works"


@torch.no_grad()
def outcomes() -> dict[tuple[str, str], dict[str, str]]:
    """By sampler and cache, what each model says."""
    # What other tests register is no part of the package.
    own = [name for name in samplers.names() if _is_own(samplers.get(name))]
    kept = ["none", *(name for name in caches.names() if _is_own(caches.get(name)))]
    pairs = [(sampler, cache) for sampler in own for cache in kept]
    table: dict[tuple[str, str], dict[str, str]] = {pair: {} for pair in pairs}
    for name, (make, ask) in MODELS.items():
        vlm = DiffusionVlm(make())
        prompt = ask(vlm.model)
        for sampler, cache in pairs:
            table[sampler, cache][name] = attempt(vlm, prompt, sampler, cache)
    return table


def _is_own(cls: type) -> bool:
    return cls.__module__.startswith("dlm_decode.")


def markdown(table: dict[tuple[str, str], dict[str, str]]) -> str:
    """One row per sampler, one column per cache; a cell names the models that do not work."""
    columns = list(dict.fromkeys(cache for _, cache in table))
    lines = ["| sampler | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for sampler in dict.fromkeys(sampler for sampler, _ in table):
        cells = [_cell(table[sampler, cache]) for cache in columns]
        lines.append(f"| `{sampler}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(by_model: dict[str, str]) -> str:
    failed = {name: reason for name, reason in by_model.items() if reason != "works"}
    if not failed:
        return "all"
    working = [name for name in by_model if name not in failed]
    reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
    return f"{', '.join(working) or 'none'} ({reasons})"


def main(arguments: list[str]) -> None:
    """Prints the table, or writes it."""
    text = markdown(outcomes())
    if arguments != ["--write"]:
        print(text, end="")
        return
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    README.write_text(before + BEGIN + text + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
