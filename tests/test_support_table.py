"""The README's table of samplers and caches is what a run says."""

from __future__ import annotations

from support_table import BEGIN, END, README, markdown, outcomes


def test_readme_says_what_a_run_says():
    written = README.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert written == markdown(outcomes()), "run `python tests/support_table.py --write`"
