"""The command `dlm-decode cost`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dlm_decode.cost.flops import forward_flops
from dlm_decode.cost.geometries import AUTOREGRESSIVE, DIFFUSION, published
from dlm_decode.cost.response import CONVENTIONS, ResponseCost, convention
from dlm_decode.cost.tables import TABLES, table
from dlm_decode.errors import InvalidInputError

if TYPE_CHECKING:
    from dlm_decode.cost.recompute import Line

__all__ = ["add_arguments", "run"]

_DIFFUSION_ONLY = ("text", "gen_length")
_MODEL_ONLY = ("stage", "convention", "text_tokens", "new_tokens")
_PARTS = ("prefill", "decode", "head", "vision", "total")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options; without `--model` and `--table`, diffusion models are shown."""
    parser.add_argument(
        "--text", type=int, help="diffusion: text tokens of the prompt (default 60)"
    )
    parser.add_argument("--gen-length", type=int, help="diffusion: canvas length (default 128)")
    parser.add_argument("--model", help=f"autoregressive model: {', '.join(AUTOREGRESSIVE)}")
    parser.add_argument(
        "--stage",
        action="append",
        help="with --model: vision stage, as in fastv:k=2,keep_ratio=0.5; repeatable",
    )
    parser.add_argument(
        "--convention",
        help=f"with --model: whose way of counting: {', '.join(CONVENTIONS)} (default: default)",
    )
    parser.add_argument(
        "--text-tokens",
        type=int,
        help="with --model: text tokens of the prompt (default: the convention's)",
    )
    parser.add_argument(
        "--new-tokens", type=int, help="with --model: generated tokens (default: the convention's)"
    )
    parser.add_argument("--table", help=f"a paper's table, recomputed: {', '.join(TABLES)}")


def run(arguments: argparse.Namespace) -> int:
    """Prints what was asked for.

    Raises:
        InvalidInputError: options that do not go together, or that the model or a stage rejects.
    """
    if arguments.table is not None:
        _reject(arguments, ("model", *_MODEL_ONLY, *_DIFFUSION_ONLY), "do not go with --table")
        _print_table(arguments.table)
    elif arguments.model is not None:
        _reject(arguments, _DIFFUSION_ONLY, "belong to diffusion models and do not go with --model")
        _print_response(arguments)
    else:
        _reject(arguments, _MODEL_ONLY, "only go with --model")
        _print_forwards(arguments)
    return 0


def _reject(arguments: argparse.Namespace, names: tuple[str, ...], reason: str) -> None:
    given = [
        f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None
    ]
    if given:
        raise InvalidInputError(f"{', '.join(given)} {reason}.")


def _print_forwards(arguments: argparse.Namespace) -> None:
    text_tokens = 60 if arguments.text is None else arguments.text
    canvas = 128 if arguments.gen_length is None else arguments.gen_length
    if text_tokens < 1 or canvas < 1:
        raise InvalidInputError("--text and --gen-length must be at least 1.")
    short = text_tokens + canvas
    print(f"{'model and input':<40} {'visual':>6} {'share':>6} {'FULL TFLOPs':>12} {'rho':>6}")
    for name, (geometry, num_visual) in DIFFUSION.items():
        total = short + num_visual
        full, text = (forward_flops(geometry, length, length) for length in (total, short))
        share = num_visual / total
        print(f"{name:<40} {num_visual:>6} {share:>6.1%} {full / 1e12:>12.2f} {text / full:>6.1%}")


def _print_response(arguments: argparse.Namespace) -> None:
    from dlm_decode.cost.recompute import cost_of

    model = published(arguments.model)
    name = "default" if arguments.convention is None else arguments.convention
    counted = convention(name)
    text = counted.text_tokens if arguments.text_tokens is None else arguments.text_tokens
    new = counted.new_tokens if arguments.new_tokens is None else arguments.new_tokens
    stages = arguments.stage or []
    whole = cost_of(model, (), counted, text, new)
    reduced = cost_of(model, stages, counted, text, new) if stages else None
    unit = {"flops": "TFLOPs", "macs": "TMACs"}[counted.unit]
    print(
        f"{arguments.model}, {model.about}: {model.visual_tokens} visual and {text} text tokens, "
        f"{new} new tokens; {unit}, convention {name}"
    )
    label = " + ".join(stages)
    width = max(len(label), len("without stage"))
    print(f"{'':<{width}} " + " ".join(f"{part:>8}" for part in _PARTS) + f" {'KV GiB':>8}")
    print(f"{'without stage':<{width}} {_numbers(whole)}")
    if reduced is not None:
        print(f"{label:<{width}} {_numbers(reduced)}")
        ratios = [_ratio(getattr(reduced, part), getattr(whole, part)) for part in _PARTS]
        ratios.append(_ratio(reduced.kv_bytes, whole.kv_bytes))
        print(f"{'ratio':<{width}} " + " ".join(f"{ratio:>8}" for ratio in ratios))


def _numbers(cost: ResponseCost) -> str:
    parts = " ".join(f"{getattr(cost, part) / 1e12:>8.3f}" for part in _PARTS)
    return f"{parts} {cost.kv_gib:>8.3f}"


def _ratio(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _print_table(name: str) -> None:
    from dlm_decode.cost.recompute import lines_of

    chosen = table(name)
    lines = list(lines_of(chosen))
    width = max(len(_label(line)) for line in lines)
    unit = "%" if chosen.is_ratio else "T"
    text_of = convention(chosen.convention).text_tokens
    print(f"{chosen.source}; convention {chosen.convention}")
    heads = (f"printed {unit}", f"here {unit}", "error")
    print(
        f"{'model and stage':<{width}} {'text':>4} "
        + " ".join(f"{head:>9}" for head in heads)
        + f" {'printed GiB':>11} {'here':>6} {'error':>6}"
    )
    for line in lines:
        text = text_of if line.row.text_tokens is None else line.row.text_tokens
        memory = f"{'-':>11} {line.cost.kv_gib:>6.3f} {'-':>6}"
        if line.kv_error is not None:
            memory = f"{line.row.kv_gib:>11.2f} {line.cost.kv_gib:>6.3f} {line.kv_error:>+6.1%}"
        print(
            f"{_label(line):<{width}} {text:>4} {line.row.reported:>9.2f} {line.computed:>9.2f} "
            f"{line.error:>+9.1%} {memory}"
        )
    for note in chosen.notes:
        print(note)


def _label(line: Line) -> str:
    return line.row.model if line.row.stage is None else f"{line.row.model} {line.row.stage}"
