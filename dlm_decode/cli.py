"""The command line `dlm-decode`. Heavy imports wait until a command needs them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import webbrowser
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dlm_decode.errors import DlmError, InvalidInputError, UnknownNameError

__all__ = ["main"]

_USER_ERROR = 2
_BROKEN_PIPE = 141  # as shells report SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: arguments; those of the process by default.

    Returns:
        0, or 2 after a mistake of the user, which is printed as one line.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = build_parser(is_training=given[:1] == ["train-tiny"]).parse_args(given)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()  # a closed pipe is noticed here, and not when the interpreter ends
        return code
    except DlmError as error:
        print(f"dlm-decode: {error}", file=sys.stderr)
        return _USER_ERROR
    except BrokenPipeError:  # a reader such as `head` has seen enough
        # What is left in the buffer would fail again when the interpreter flushes it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except OSError as error:
        if error.filename is None:
            raise
        print(f"dlm-decode: {error.filename!r}: {error.strerror}", file=sys.stderr)
        return _USER_ERROR
    except KeyboardInterrupt:
        print("dlm-decode: interrupted", file=sys.stderr)
        return 130


def build_parser(is_training: bool = False) -> argparse.ArgumentParser:
    """The parser with every command.

    Args:
        is_training: add the options of `train-tiny`, whose module imports torch.
    """
    parser = argparse.ArgumentParser(
        prog="dlm-decode", description="Decode masked-diffusion vision-language models."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_list(commands)
    _add_show(commands)
    _add_demo(commands)
    _add_evaluate(commands)
    _add_compare(commands)
    _add_tune(commands)
    _add_analyse(commands)
    _add_bench(commands)
    _add_cost(commands)
    _add_train(commands, is_training)
    return parser


def _version() -> str:
    try:
        return version("dlm-decode")
    except PackageNotFoundError:
        return "uninstalled"


def _command(
    commands: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    return parser


def _add_model_options(parser: argparse.ArgumentParser, default: str = "tiny") -> None:
    parser.add_argument(
        "--model",
        default=default,
        help=f"shipped model, checkpoint folder or hub id (default: {default})",
    )
    parser.add_argument(
        "--model-type", help="read the folder as this kind of model; see dlm-decode list models"
    )
    parser.add_argument("--dtype", help="float32, bfloat16, float16 (default: the checkpoint's)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps")
    parser.add_argument("--device-map", help="auto, to spread a large model over devices")
    parser.add_argument(
        "--attn",
        default="sdpa",
        help="sdpa, eager, flash_attention_2, flex_attention (default: sdpa)",
    )


def _load(arguments: argparse.Namespace) -> Any:
    import dlm_decode

    return dlm_decode.load(
        arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        device_map=arguments.device_map,
        attn_implementation=arguments.attn,
        model_type=arguments.model_type,
    )


def _add_decoding_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sampler",
        help="name or spec, as in baseline:remasking=margin (default: baseline; autoregressive for "
        "models that are)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the sampler; repeatable",
    )
    parser.add_argument(
        "--stage",
        action="append",
        default=[],
        help="vision stage, as in stride:keep_ratio=0.5; repeatable",
    )
    parser.add_argument(
        "--cache",
        help="cache policy, as in prefix:refresh_interval=32; none for none "
        "(default: the sampler's own)",
    )
    parser.add_argument("--gen-length", type=int, help="canvas length in tokens")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--block-length", type=int)
    parser.add_argument(
        "--schedule", help="positions per step, as in shift:shift=0.25 (default: uniform)"
    )
    parser.add_argument("--steps-per-block", type=int, help="instead of --steps")
    parser.add_argument("--step-ratio", type=float, help="steps per token, instead of --steps")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-k", type=int, help="only so many likeliest tokens take part")
    parser.add_argument("--top-p", type=float, help="only tokens up to this probability take part")
    parser.add_argument("--cfg-scale", type=float, help="classifier-free guidance")
    parser.add_argument("--seed", type=int)
    parser.add_argument(
        "--preset",
        help="official: the official program with its quirks; "
        "eval egoschema and eval mlvu also know lown-paper",
    )
    parser.add_argument(
        "--eos-last", action="store_true", default=None, help="commit end-of-sequence tokens last"
    )


def _decoding_options(arguments: argparse.Namespace) -> dict[str, Any]:
    from dlm_decode import cache as caches
    from dlm_decode import quota, samplers, vision

    names = (
        "cache",
        "gen_length",
        "steps",
        "block_length",
        "schedule",
        "steps_per_block",
        "step_ratio",
        "temperature",
        "top_k",
        "top_p",
        "cfg_scale",
        "seed",
        "preset",
        "eos_last",
    )
    options = {name: getattr(arguments, name) for name in names}
    if arguments.cache not in (None, "none"):
        options["cache"] = caches.make(arguments.cache)
    if arguments.schedule is not None:
        options["schedule"] = quota.make(arguments.schedule)
    stages = [vision.make(stage) for stage in arguments.stage]
    # Whatever can be wrong without the model has been found by now: this reads its config.
    spec = arguments.sampler or _own_sampler(arguments)
    if arguments.set:
        for entry in arguments.set:
            if "=" not in entry:
                raise InvalidInputError(f"--set {entry!r} is not KEY=VALUE.")
        spec += ("," if ":" in spec else ":") + ",".join(arguments.set)
    return {"sampler": samplers.make(spec), "stages": stages, **options}


def _own_sampler(arguments: argparse.Namespace) -> str:
    """What the model is decoded with where nothing is said."""
    from dlm_decode.loading import is_autoregressive
    from dlm_decode.samplers.autoregressive import Autoregressive

    is_other = is_autoregressive(arguments.model, arguments.model_type)
    return Autoregressive.name if is_other else "baseline"


def _add_video_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--frames", "--max-frames", dest="max_frames", type=int, help="frames per video at most"
    )
    parser.add_argument("--fps", type=float, help="frames to take per second of a video")
    parser.add_argument(
        "--force-sample",
        action="store_true",
        default=None,
        help="take --frames frames at even distances of every video, however short",
    )
    parser.add_argument(
        "--frame-rate", type=float, help="frames per second of folders, which do not say it"
    )
    parser.add_argument(
        "--time-instruction",
        action="store_true",
        default=None,
        help="tell the model how long videos are and where their frames lie",
    )
    parser.add_argument("--think-mode", help="think, no_think or none, for models trained with it")


def _video_options(arguments: argparse.Namespace) -> dict[str, Any]:
    names = (
        "max_frames",
        "fps",
        "force_sample",
        "frame_rate",
        "time_instruction",
        "think_mode",
    )
    return {name: getattr(arguments, name) for name in names}


def _add_generate(commands: Any) -> None:
    parser = _command(commands, "generate", "Answer a question about images or videos.", _generate)
    _add_model_options(parser)
    parser.add_argument("--prompt", required=True, help="the question")
    parser.add_argument("--image", action="append", default=[], help="image file; repeatable")
    parser.add_argument(
        "--video", action="append", default=[], help="video file or folder of frames; repeatable"
    )
    _add_video_options(parser)
    _add_decoding_options(parser)
    parser.add_argument(
        "--stop", action="append", help="stop string, beside the model's own; repeatable"
    )
    parser.add_argument("--no-stop", action="store_true", help="fill the whole canvas")
    parser.add_argument("--suffix", help="text that follows the canvas")
    parser.add_argument(
        "--prefill",
        help="text that the canvas starts from; <mask:4> is a hole of four tokens, <infill:4> "
        "one of at most four (LaViDa FIM)",
    )
    parser.add_argument("--json", action="store_true", help="answer, tokens and cost as JSON")
    parser.add_argument("--stream", action="store_true", help="show the canvas as it denoises")
    parser.add_argument(
        "--trajectory", metavar="OUT.jsonl", help="record every step; see dlm-decode show"
    )
    _add_probe(parser, None)
    parser.add_argument(
        "--track",
        action="append",
        default=[],
        help="wandb, wandb:offline, trackio, jsonl:PATH; repeatable",
    )


def _generate(arguments: argparse.Namespace) -> int:
    from dlm_decode.autoregressive import DIFFUSION_ONLY, check_options
    from dlm_decode.loading import is_autoregressive
    from dlm_decode.track import make_tracker

    if arguments.json and arguments.stream:
        raise InvalidInputError(
            "--json and --stream both write to standard output; use one of them."
        )
    if arguments.stop and arguments.no_stop:
        raise InvalidInputError("--stop and --no-stop exclude each other.")
    options = {
        **_decoding_options(arguments),
        **_video_options(arguments),
        "suffix": arguments.suffix,
        "prefill": arguments.prefill,
        "probe": arguments.probe,
    }
    if is_autoregressive(arguments.model, arguments.model_type):
        unfit = {name: value for name, value in options.items() if name in DIFFUSION_ONLY}
        check_options(options["sampler"], unfit)
    track = [*arguments.track, *([f"jsonl:{arguments.trajectory}"] if arguments.trajectory else [])]
    tracker = make_tracker(track) if track else None
    vlm = _load(arguments)
    streamer = None
    if arguments.stream:
        from dlm_decode.stream import ConsoleStreamer

        streamer = ConsoleStreamer(vlm.token_text, vlm.decode_text, vlm.special_ids.mask)
    out = vlm.generate(
        arguments.prompt,
        images=arguments.image,
        videos=arguments.video,
        stop=False if arguments.no_stop else arguments.stop,
        streamer=streamer,
        track=tracker,
        **options,
    )
    if arguments.json:
        result = {"text": out.text, "tokens": out.sequences[0].tolist(), "cost": out.cost.to_dict()}
        print(json.dumps({**result, "run": out.trajectory.run}, ensure_ascii=False, indent=2))
    elif not arguments.stream:
        print(out.text)
    print(out.cost.summary(), file=sys.stderr)
    return 0


def _add_list(commands: Any) -> None:
    parser = _command(commands, "list", "Names of what is installed.", _list)
    parser.add_argument(
        "what",
        nargs="?",
        choices=("models", "samplers", "schedules", "caches", "stages"),
        help="only these",
    )
    parser.add_argument("--json", action="store_true")


def _list(arguments: argparse.Namespace) -> int:
    import dlm_decode
    from dlm_decode import cache as caches
    from dlm_decode import models, quota, samplers, stages
    from dlm_decode.models import autoregressive

    listing = {
        "models": {
            "shipped": dlm_decode.shipped_models(),
            "types": models.names(),
            "autoregressive types": autoregressive.names(),
        },
        "samplers": {
            **{name: _first_line(samplers.get(name)) for name in samplers.names()},
            **{name: f"= {spec}" for name, spec in samplers.aliases().items()},
        },
        "schedules": {name: _first_line(quota.get(name)) for name in quota.names()},
        "caches": {name: _first_line(caches.get(name)) for name in caches.names()},
        "stages": {name: _first_line(stages.get(name)) for name in stages.names()},
    }
    if arguments.what:
        listing = {arguments.what: listing[arguments.what]}
    if arguments.json:
        print(json.dumps(listing, indent=2))
        return 0
    for title, entries in listing.items():
        print(f"{title}:")
        width = max(map(len, entries))
        for name, value in entries.items():
            text = ", ".join(value) if isinstance(value, list) else value
            print(f"  {name:<{width}}  {text}")
    return 0


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]


def _add_show(commands: Any) -> None:
    text = "Make an HTML page that plays a trajectory back, or draw what a vision stage keeps."
    parser = _command(commands, "show", text, _show)
    parser.add_argument(
        "trajectory", type=Path, nargs="?", help="file written by generate --trajectory"
    )
    parser.add_argument("--stage", help="draw what this stage keeps of --image instead")
    parser.add_argument("--image", help="image file, with --stage")
    _add_model_options(parser)
    parser.add_argument(
        "--output",
        type=Path,
        help="the page (default: beside the trajectory or image, ending in .html); with --stage it "
        "may end in .png, .svg or .html",
    )
    parser.add_argument("--open", action="store_true", help="open it in the browser")


def _show(arguments: argparse.Namespace) -> int:
    if (arguments.trajectory is None) == (arguments.stage is None):
        raise InvalidInputError("show needs a trajectory file or --stage, one of them.")
    if (arguments.stage is None) != (arguments.image is None):
        raise InvalidInputError("--stage and --image go together.")
    page = _show_trajectory(arguments) if arguments.stage is None else _show_stage(arguments)
    print(page)
    if arguments.open:
        webbrowser.open(page.resolve().as_uri())
    return 0


def _show_trajectory(arguments: argparse.Namespace) -> Path:
    from dlm_decode.viewer import write_html

    return write_html(
        arguments.trajectory, arguments.output or arguments.trajectory.with_suffix(".html")
    )


def _show_stage(arguments: argparse.Namespace) -> Path:
    from dlm_decode import vision
    from dlm_decode.eval.stage_view import panels_of, save

    stage = vision.make(arguments.stage)
    panels = panels_of(_load(arguments), stage, arguments.image)
    output = arguments.output or Path(arguments.image).with_suffix(".html")
    return save(panels, f"{arguments.stage} on {Path(arguments.image).name}", output)


def _add_demo(commands: Any) -> None:
    parser = _command(commands, "demo", "Ask the shipped model about three pictures.", _demo)
    _add_model_options(parser)
    _add_decoding_options(parser)


def _demo(arguments: argparse.Namespace) -> int:
    import dlm_decode

    folder = Path(dlm_decode.__file__).parent / "data" / "demo"
    options = _decoding_options(arguments)
    vlm = _load(arguments)
    demo = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
    shown = ""
    for entry in demo["examples"]:
        if entry["image"] != shown:
            shown = entry["image"]
            print(shown)
        out = vlm.generate(entry["prompt"], images=folder / shown, **options)
        flops = (out.cost.flops + out.cost.head_flops + out.cost.vision_flops) / 1e9
        print(f"  {entry['prompt']}\n    {out.text}")
        print(
            f"    expected: {entry['answer']}   "
            f"[{out.cost.num_forwards} forwards, {flops:.2f} GFLOPs]"
        )
    print(f"pictures: {folder}\n{demo['note']}")
    return 0


def _add_evaluate(commands: Any) -> None:
    text = "Measure accuracy and cost on the questions of a task."
    parser = commands.add_parser("eval", help=text, description=text, allow_abbrev=False)
    tasks = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    scenes = _command(
        tasks, "scenes", "Generated pictures with known answers, held out.", _evaluate
    )
    clips = _command(
        tasks, "clips", "Generated clips: movement, order and counting, four options.", _evaluate
    )
    for task in (scenes, clips):
        task.set_defaults(load_task=_generated)
        _add_kinds(task)
    ego = _command(
        tasks, "egoschema", "EgoSchema: 500 questions, five options, accuracy.", _evaluate
    )
    ego.set_defaults(load_task=_egoschema)
    mlvu = _command(
        tasks, "mlvu", "MLVU: six or four options, mean accuracy over task types.", _evaluate
    )
    mlvu.set_defaults(load_task=_mlvu)
    mlvu.add_argument("--split", default="test", help="test (502 questions) or dev (2175)")
    for task in (ego, mlvu):
        task.add_argument(
            "--data", help="folder or hub id of the annotations (default: a public hub id)"
        )
        task.add_argument(
            "--videos",
            type=Path,
            help="folder of the video files, or of folders of frames (default: beside --data)",
        )
        task.add_argument(
            "--instruction", help="line behind the options instead of the usual one; '' for none"
        )
    for task in (clips, ego, mlvu):
        _add_video_options(task)
    sizes = ((scenes, 1000, 32), (clips, 1000, 32), (ego, None, 1), (mlvu, None, 1))
    for task, limit, batch in sizes:
        _add_model_options(task, "tiny-video" if task is clips else "tiny")
        _add_decoding_options(task)
        task.set_defaults(default_limit=limit, default_batch=batch)
        task.add_argument(
            "--limit", type=int, help=f"number of questions (default {limit or 'all'})"
        )
        task.add_argument("--batch", type=int, help=f"questions per batch (default {batch})")
        task.add_argument("--blind", action="store_true", help="show neither pictures nor videos")
        task.add_argument(
            "--track",
            action="append",
            default=[],
            help="wandb, wandb:offline, trackio; repeatable",
        )
        task.add_argument(
            "--output",
            type=Path,
            required=True,
            help="JSON lines, one per question; a run resumes from it. The report goes beside it",
        )


def _evaluate(arguments: argparse.Namespace) -> int:
    from dlm_decode.eval import runner
    from dlm_decode.eval.sample_log import check_track

    _apply_preset(arguments)
    limit = arguments.default_limit if arguments.limit is None else arguments.limit
    batch = arguments.default_batch if arguments.batch is None else arguments.batch
    runner.check_sizes(limit, batch)
    task = arguments.load_task(arguments)
    options = _decoding_options(arguments)
    if hasattr(arguments, "max_frames"):
        options.update(_video_options(arguments))
    runner.check_options(options)
    check_track(arguments.track)
    report = runner.evaluate(
        _load(arguments),
        task,
        options,
        output=arguments.output,
        limit=limit,
        batch=batch,
        is_blind=arguments.blind,
        track=arguments.track,
    )
    print(json.dumps(report, indent=2, ensure_ascii=False))
    if report["errors"]:
        print(
            f"dlm-decode: {report['errors']} of {report['questions']} questions could not be "
            f"answered and count as wrong; the first: {report['first_error']}",
            file=sys.stderr,
        )
    return int(report["errors"] == report["questions"])


def _apply_preset(arguments: argparse.Namespace) -> None:
    """Fills in what a preset for evaluations says; what is given beside it wins."""
    from dlm_decode.eval.video_questions import PRESETS
    from dlm_decode.settings import PRESETS as DECODING

    name = arguments.preset
    if name is None or name in DECODING:
        return
    if name not in PRESETS:
        raise UnknownNameError("preset", name, [*PRESETS, *DECODING])
    if not hasattr(arguments, "max_frames"):
        raise InvalidInputError(
            f"--preset {name} is for questions about videos; use it with clips, egoschema or mlvu."
        )
    arguments.preset = None
    has_steps = any(
        getattr(arguments, key) is not None for key in ("steps", "steps_per_block", "step_ratio")
    )
    for key, value in PRESETS[name].items():
        if getattr(arguments, key) is None and not (key == "steps" and has_steps):
            setattr(arguments, key, value)


def _generated(arguments: argparse.Namespace) -> Any:
    from dlm_decode.eval.generated import generated_task

    return generated_task(arguments.task, kinds=arguments.kinds)


def _add_kinds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kind",
        action="append",
        dest="kinds",
        metavar="KIND",
        help="only questions of this kind; of scenes: describe, colour, where, cell, digit, count, "
        "exists, choice, photo (a picture that is no scene), or list, which is asked only where it "
        "is named; of clips: movement, order, count; repeatable (default: all but list)",
    )


def _egoschema(arguments: argparse.Namespace) -> Any:
    from dlm_decode.eval import egoschema

    return egoschema.load_task(arguments.data, **_task_options(arguments))


def _mlvu(arguments: argparse.Namespace) -> Any:
    from dlm_decode.eval import mlvu

    return mlvu.load_task(arguments.data, split=arguments.split, **_task_options(arguments))


def _task_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "videos": arguments.videos,
        "instruction": arguments.instruction,
        "is_blind": arguments.blind,
    }


def _add_compare(commands: Any) -> None:
    text = "Compare settings on the same held-out questions: score against cost."
    parser = _command(commands, "compare", text, _compare)
    _add_model_options(parser)
    parser.add_argument(
        "--variant",
        action="append",
        dest="settings",
        type=lambda text: ("variant", text),
        metavar="VARIANT",
        help="SAMPLER[+STAGE...][@key=value,...]; repeatable",
    )
    parser.add_argument(
        "--suite",
        action="append",
        dest="settings",
        type=lambda text: ("suite", text),
        metavar="NAME",
        help="a list of variants that begins with the reference: lown, lown-choices, lown-budget, "
        "caches, stages; repeatable; the first variant of all is the reference",
    )
    parser.add_argument(
        "--limit", type=int, default=1000, help="number of questions (default 1000)"
    )
    parser.add_argument("--batch", type=int, default=32, help="questions per batch (default 32)")
    _add_kinds(parser)
    parser.add_argument(
        "--task",
        default="scenes",
        help="scenes, or clips for a model that reads videos (default scenes)",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder; a run resumes from it")
    parser.add_argument(
        "--match",
        metavar="VARIANT",
        help="name the cheapest setting of another sampler that costs at least as much",
    )
    parser.add_argument(
        "--match-score",
        metavar="VARIANT",
        help="name the cheapest other setting that scores at least as much",
    )
    parser.add_argument(
        "--match-random",
        metavar="VARIANT",
        help="also run this setting of lown with as many FULL steps, drawn at random (three seeds)",
    )
    parser.add_argument("--plot", action="store_true", help="also plot.png and plot.svg")


def _compare(arguments: argparse.Namespace) -> int:
    from dlm_decode.eval import tables
    from dlm_decode.eval.compare import compare
    from dlm_decode.eval.generated import generated_task
    from dlm_decode.eval.matches import describe_match, matched, matched_score, random_access
    from dlm_decode.eval.variants import Variant, check_suite, suite
    from dlm_decode.settings import resolve_settings

    asked: dict[str, Any] = {
        "limit": arguments.limit,
        "batch": arguments.batch,
        "task": generated_task(arguments.task, kinds=arguments.kinds),
    }
    given = arguments.settings or []
    parsed = {text: Variant.parse(text) for kind, text in given if kind == "variant"}
    for kind, text in given:
        if kind == "suite":
            check_suite(text)
    vlm = _load(arguments)
    own = resolve_settings({}, vlm.generation_defaults)
    names = [
        name
        for kind, text in given
        for name in ([text] if kind == "variant" else suite(text, own, vlm.own_sampler))
    ]
    variants = {name: parsed.get(name) or Variant.parse(name) for name in names}
    for option in ("match", "match_score", "match_random"):
        name = getattr(arguments, option)
        if name is not None and name not in variants:
            flag = option.replace("_", "-")
            raise InvalidInputError(f"--{flag} {name!r} is none of the variants.")
    if arguments.match_random is not None:
        variants[arguments.match_random].with_random_access(1.0, 0)  # refuses what is not lown
    folder = arguments.output
    rows = compare(vlm, list(variants.values()), folder, **asked)
    matches = []
    if arguments.match_random is not None:
        name = arguments.match_random
        drawn = random_access(rows, variants[name])
        variants.update({variant.name: variant for variant in drawn})
        rows = compare(vlm, list(variants.values()), folder, **asked)
        rivals = [row for row in rows if row["name"] in {variant.name for variant in drawn}]
        matches.append({"variant": name, "by": "random", "match": [r["name"] for r in rivals]})
    for by, name, find in (
        ("cost", arguments.match, matched),
        ("score", arguments.match_score, matched_score),
    ):
        if name is not None:
            rival = find(rows, name)
            matches.append({"variant": name, "by": by, "match": rival and rival["name"]})
    tables.save(folder, rows, matches)
    print(tables.render(rows))
    for match in matches:
        print(describe_match(rows, match))
    if arguments.plot:
        for suffix in ("png", "svg"):
            tables.draw(rows, folder / f"plot.{suffix}")
    return 0


def _add_tune(commands: Any) -> None:
    text = "Find the cheapest setting that keeps a share of the baseline's score."
    parser = _command(commands, "tune", text, _tune)
    parser.description = (
        f"{text} Tried on questions about training-split scenes: every sampler over every cache, "
        "the baseline with fewer steps, lown with budgets, fast_dllm and lown+fast_dllm with "
        "thresholds."
    )
    _add_model_options(parser)
    parser.add_argument(
        "--keep", type=float, default=0.99, help="share of the score, in (0, 1] (default 0.99)"
    )
    parser.add_argument(
        "--by",
        choices=("flops", "seconds"),
        default="flops",
        help="what is to be cheap: decoder FLOPs, or paired seconds on this machine "
        "(default flops)",
    )
    parser.add_argument("--limit", type=int, default=200, help="number of questions (default 200)")
    parser.add_argument("--batch", type=int, default=32, help="questions per batch (default 32)")
    _add_kinds(parser)
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder for answers, tables and tuned.json; a run resumes from it",
    )


def _tune(arguments: argparse.Namespace) -> int:
    from dlm_decode.eval.run_scenes import Scenes
    from dlm_decode.eval.tables import render
    from dlm_decode.eval.tune import tune

    kinds = Scenes(kinds=arguments.kinds).kinds  # refuses what does not exist, before loading
    result = tune(
        _load(arguments),
        arguments.output,
        keep=arguments.keep,
        by=arguments.by,
        limit=arguments.limit,
        batch=arguments.batch,
        kinds=kinds,
    )
    print(render(result["rows"]))
    print(
        f"cheapest by {result['by']} that keeps {result['keep']:.1%} of the score: "
        f"{result['chosen']['name']}"
    )
    print(result["command"])
    return 0


def _add_bench(commands: Any) -> None:
    text = "Measure wall-clock time against FLOPs on a model of any size with random weights."
    parser = _command(commands, "bench", text, _bench)
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        help="SAMPLER[+STAGE...][@key=value,...]; repeatable, the first is the reference",
    )
    parser.add_argument(
        "--stage",
        help="instead: seconds of this stage against those of the prefill that it saves, as in "
        "specflow:keep_tokens=64",
    )
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--num-layers", type=int, default=8)
    parser.add_argument(
        "--visual-side", type=int, default=27, help="patches per side of the picture (default 27)"
    )
    parser.add_argument("--num-text", type=int, default=32, help="text tokens of the prompt")
    parser.add_argument("--gen-length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, float16")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps")
    parser.add_argument("--attn", default="sdpa", help="as in generate (default: sdpa)")
    parser.add_argument("--output", type=Path, help="also write the rows as JSON")


def _bench(arguments: argparse.Namespace) -> int:
    import torch

    from dlm_decode.eval import bench
    from dlm_decode.eval.variants import Variant

    names = ("hidden_size", "num_layers", "visual_side", "num_text", "gen_length", "steps")
    size = bench.BenchSize(**{name: getattr(arguments, name) for name in names})
    variants = [Variant.parse(text) for text in arguments.variant]
    if arguments.dtype not in ("float32", "bfloat16", "float16"):
        raise InvalidInputError(
            f"--dtype must be float32, bfloat16 or float16, got {arguments.dtype!r}."
        )
    if bool(variants) == (arguments.stage is not None):
        raise InvalidInputError("bench needs --variant or --stage, one of them.")
    if arguments.stage is not None:
        from dlm_decode import vision
        from dlm_decode.eval.stage_bench import bench_stage

        report = bench_stage(
            vision.make(arguments.stage),
            size,
            rounds=arguments.rounds,
            dtype=getattr(torch, arguments.dtype),
            device=arguments.device,
            attn_implementation=arguments.attn,
        )
        text = json.dumps({"stage": arguments.stage, "size": vars(size), **report}, indent=2)
        print(text)
        if arguments.output is not None:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(text + "\n", encoding="utf-8")
        return 0
    vlm = bench.random_vlm(
        size,
        dtype=getattr(torch, arguments.dtype),
        device=arguments.device,
        attn_implementation=arguments.attn,
    )
    rows = bench.bench(vlm, variants, size, rounds=arguments.rounds)
    machine = bench.machine(vlm)
    print(json.dumps(machine))
    print(bench.render(rows))
    if arguments.output is not None:
        report = {"machine": machine, "size": vars(size), "rows": rows}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _add_analyse(commands: Any) -> None:
    text = "Measure how often the picture matters and how far certificates can be trusted."
    parser = _command(commands, "analyse", text, _analyse)
    _add_model_options(parser)
    _add_decoding_options(parser)
    parser.set_defaults(sampler="lown")
    parser.add_argument(
        "--trajectory",
        action="append",
        type=Path,
        default=[],
        help="analyse this file (generate --probe) instead of held-out questions; repeatable",
    )
    parser.add_argument("--limit", type=int, default=200, help="number of questions (default 200)")
    parser.add_argument("--batch", type=int, default=32, help="questions per batch (default 32)")
    _add_kinds(parser)
    _add_probe(parser, "packed")
    parser.add_argument("--plot", action="store_true", help="also the maps as PNG and SVG")
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        help="folder for trajectories, analysis.json and the maps; a run resumes from it",
    )


def _add_probe(parser: argparse.ArgumentParser, default: str | None) -> None:
    parser.add_argument(
        "--probe",
        choices=("packed", "original"),
        default=default,
        help="record in every step what the model would propose with and without visual tokens, "
        "in these rotary positions",
    )


def _analyse(arguments: argparse.Namespace) -> int:
    from dlm_decode.eval import analyse
    from dlm_decode.eval.run_scenes import Scenes

    folder: Path = arguments.output
    options = _decoding_options(arguments)
    task = Scenes(kinds=arguments.kinds)
    if arguments.trajectory:
        if arguments.kinds:
            raise InvalidInputError(
                "--kind chooses held-out questions, and --trajectory files hold their own; "
                "use one of them."
            )
        paths = {"trajectories": arguments.trajectory}
    else:
        vlm = _load(arguments)
        runs = {"baseline": {**options, "sampler": "baseline"}, arguments.sampler: options}
        paths = {
            name: analyse.record_scenes(
                vlm,
                run,
                folder / f"{number}",
                limit=arguments.limit,
                batch=arguments.batch,
                positions=arguments.probe,
                task=task,
            )
            for number, (name, run) in enumerate(runs.items())
        }
    folder.mkdir(parents=True, exist_ok=True)
    reports = {name: analyse.report_of(analyse.read_responses(p)) for name, p in paths.items()}
    (folder / "analysis.json").write_text(json.dumps(reports, indent=2) + "\n", encoding="utf-8")
    for number, (name, report) in enumerate(reports.items()):
        print(f"{name}\n{analyse.render(report)}")
        if arguments.plot:
            for suffix in ("png", "svg"):
                analyse.draw_map(report["map"], folder / f"map{number}.{suffix}")
    return 0


def _add_cost(commands: Any) -> None:
    from dlm_decode.cost.command import add_arguments, run

    text = (
        "Costs at published sizes, by formula: of a diffusion model's forwards with and without "
        "the picture, of an autoregressive model's response with and without stages, and papers' "
        "tables recomputed."
    )
    add_arguments(_command(commands, "cost", text, run))


def _add_train(commands: Any, is_training: bool) -> None:
    parser = _command(
        commands, "train-tiny", "Train the small model that ships with the package.", _train
    )
    if is_training:
        from dlm_decode.training.tiny import add_arguments

        add_arguments(parser)


def _train(arguments: argparse.Namespace) -> int:
    from dlm_decode.training.tiny import run

    return run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
