from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess

import pytest

from dlm_decode.errors import InvalidInputError
from dlm_decode.viewer import render_html, write_html

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.fixture(scope="module")
def records(vlm):
    out = vlm.generate(
        ["what colour is the circle ?", "<b>where</b> is it ?"],
        stop=False,
        prefill=["red", None],
        gen_length=6,
    )
    return list(out.trajectory.records())


def data_of(page):
    return json.loads(re.search(r"const records = (.*);\n", page)[1])


def test_page_holds_the_records_and_nothing_from_outside(records):
    page = render_html(records)
    assert data_of(page) == json.loads(json.dumps(records))
    assert not re.search(r"""(src|href)=|https?://|@import|url\(""", page)


def test_texts_cannot_become_markup(records):
    hostile = copy.deepcopy(records)
    hostile[0]["rows"][0]["question"] = "</script><script>alert(1)</script>"
    page = render_html(hostile)
    assert "</script><script>alert" not in page
    assert page.count("</script>") == 1
    assert data_of(page)[0]["rows"][0]["question"] == "</script><script>alert(1)</script>"


def test_files_that_are_no_trajectories_are_named(tmp_path):
    with pytest.raises(InvalidInputError, match="no trajectory file"):
        write_html(tmp_path / "none.jsonl", tmp_path / "x.html")
    bad = tmp_path / "bad.jsonl"
    for text, message in (
        ("hello", "line 1 is not JSON"),
        ('{"type": "step"}', "does not begin"),
        ('{"a": 1}', "no known 'type'"),
    ):
        bad.write_text(text)
        with pytest.raises(InvalidInputError, match=message):
            write_html(bad, tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()


def test_cut_off_file_shows_what_is_there(records, tmp_path):
    path = tmp_path / "cut.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records[:3]) + '\n{"type": "st')
    assert len(data_of(render_html(path))) == 3


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_page_runs_in_a_browser(records, tmp_path):
    hostile = copy.deepcopy(records)
    hostile[1]["rows"][0]["commits"][0][2] = "<img src=x onerror=document.title='broken'>"
    page = write_html(hostile, tmp_path / "sub" / "page.html")
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-sync --no-first-run "
        "--disable-background-networking"
    )
    command = [
        BROWSER,
        *flags.split(),
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    dom = done.stdout
    assert 'data-ready="true"' in dom
    assert f"after {len(records) - 2} of {len(records) - 2} steps" in dom
    assert dom.count('class="token') == 6
    assert "&lt;img src=x" in dom
    assert "<title>broken" not in dom
    assert "what colour is the circle ?" in dom
