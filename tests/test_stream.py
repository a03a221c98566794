import io

import torch

from dlm_decode.stream import MASK_CHARACTER, ConsoleStreamer

WORDS = {0: "red", 1: "\n", 2: "."}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def play(stream):
    streamer = ConsoleStreamer(
        WORDS.__getitem__, lambda ids: " ".join(WORDS[i] for i in ids if i != 1), 9, stream
    )
    streamer.put(torch.tensor([7, 7]))
    streamer.put_draft(torch.tensor([9, 1, 9]))
    streamer.put_draft(torch.tensor([0, 1, 2]))
    streamer.put(torch.tensor([0, 1, 2]))
    streamer.end()
    return stream.getvalue()


def test_plain_output_is_one_line_per_step():
    assert play(io.StringIO()).splitlines() == [
        f"{MASK_CHARACTER} ⏎ {MASK_CHARACTER}",
        "red ⏎ .",
        "red .",
    ]


def test_a_terminal_is_redrawn_in_place():
    shown = play(Terminal())
    assert shown.count("\x1b[1F\x1b[J") == 2
    assert shown.endswith("red .\n")


def test_several_responses():
    stream = io.StringIO()
    streamer = ConsoleStreamer(WORDS.__getitem__, str, 9, stream)
    for _ in range(2):
        streamer.put(torch.tensor([7]))
        streamer.put(torch.tensor([[0]]))
        streamer.end()
    assert stream.getvalue() == "[0]\n[0]\n"
