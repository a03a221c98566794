"""Videos: which frames are taken and when they are shown; files, folders, lists, arrays; errors."""

from __future__ import annotations

import sys
from fractions import Fraction

import numpy as np
import pytest
from golden_models import read_json
from PIL import Image
from test_media import pixel

from dlm_decode.errors import InvalidInputError, MediaError
from dlm_decode.video import Clip, FrameSampling, open_video

CASES = read_json("vidlada", "frame_sampling.json")


def sampling_of(case, **changes):
    return FrameSampling(case["max_frames"], case["target_fps"], case["force"], **changes)


@pytest.mark.parametrize("case", CASES)
def test_frame_sampling(case):
    """Frames as in the official program; times too, with its drift where asked for."""
    total, rate = case["total_frames"], case["avg_fps"]
    official = sampling_of(case, has_drifting_times=True)
    indices, times = official.pick(total, rate)
    assert indices == case["idx"] and times is not None
    assert ",".join(f"{time:.2f}s" for time in times) == case["time"]
    assert total / rate == pytest.approx(case["video_time"], abs=1e-12)
    indices, times = sampling_of(case).pick(total, rate)
    assert indices == case["idx"]
    assert times == [index / rate for index in indices]


def test_times_drift_only_where_asked_for():
    assert len(CASES) == 60
    drifting = FrameSampling(8, 1, has_drifting_times=True)
    assert drifting.pick(3, 0.6) == ([0, 1, 2], [0.0, 1.0, 2.0])
    assert FrameSampling(8, 1).pick(3, 0.6)[1] == pytest.approx([0.0, 1 / 0.6, 2 / 0.6])
    assert FrameSampling(8, has_drifting_times=True).pick(2, 4.0) == ([0, 1], [0.0, 0.25])


def test_rates():
    assert FrameSampling(99, fps=10).pick(20, 25.0)[0] == list(range(0, 20, 2))  # 2.5 is even 2
    assert FrameSampling(99, fps=1000).pick(5, 25.0)[0] == [0, 1, 2, 3, 4]
    assert FrameSampling(99).pick(5, 25.0)[0] == [0, 1, 2, 3, 4]
    assert FrameSampling(3).pick(5, None) == ([0, 2, 4], None)
    assert FrameSampling(1).pick(100, None) == ([0], None)
    assert FrameSampling(4, force_sample=True).pick(1, 5.0) == ([0] * 4, [0.0] * 4)
    indices, _ = FrameSampling().pick(100, None)
    assert (indices[0], indices[-1], len(set(indices))) == (0, 99, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_frames": 0}, "max_frames must be a whole number of at least 1, got 0"),
        ({"max_frames": 2.5}, "max_frames must be a whole number"),
        ({"max_frames": True}, "max_frames must be a whole number"),
        ({"fps": 0}, "fps must be a finite number above 0 .*got 0"),
        ({"fps": -1.0}, "fps must be a finite number above 0"),
        ({"fps": float("nan")}, "fps must be a finite number above 0"),
        ({"fps": float("inf")}, "a large number takes every frame; got inf"),
        ({"frame_rate": 0}, "frame_rate must be a finite number above 0"),
        ({"force_sample": 1}, "force_sample must be True or False"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(InvalidInputError, match=message):
        FrameSampling(**options)


def shades(clip):
    return [pixel(frame, 1, 1)[0] for frame in clip.frames]


def grey_frames(count, step=10):
    return [np.full((4, 6, 3), step * index, np.uint8) for index in range(count)]


def test_folders_lists_and_arrays(tmp_path):
    frames = grey_frames(12)
    for index, frame in enumerate(frames):
        Image.fromarray(frame).save(tmp_path / f"frame{index}.png")
    (tmp_path / ".hidden").write_text("no frame")
    sampling = FrameSampling(4)
    for source in (tmp_path, str(tmp_path), np.stack(frames), frames):
        clip = open_video(source, sampling)
        assert clip.indices == [0, 3, 7, 11] and clip.total == 12
        assert shades(clip) == [0, 30, 70, 110]  # frame10 and frame11 come last
        assert clip.rate is clip.times is None
    assert len(open_video(tmp_path).frames) == 12
    assert str(tmp_path) in open_video(tmp_path).name
    mixed = open_video([tmp_path / "frame0.png", frames[1], Image.fromarray(frames[2])])
    assert shades(mixed) == [0, 10, 20]
    assert shades(open_video(frames[:2], FrameSampling(3, force_sample=True))) == [0, 0, 10]


def test_a_frame_rate_gives_folders_times():
    clip = open_video(grey_frames(10), FrameSampling(8, fps=1, frame_rate=3))
    assert clip.indices == [0, 3, 6, 9]
    assert clip.times == [0.0, 1.0, 2.0, 3.0]
    untimed = open_video(grey_frames(10), FrameSampling(8, fps=1))
    assert len(untimed.indices) == 8  # nobody knows what a second is
    with pytest.raises(InvalidInputError, match="fps=1 needs to know how fast the list of 10"):
        open_video(grey_frames(10), FrameSampling(8, fps=1), is_timed=True)
    with pytest.raises(MediaError, match=r"the list of 10 frames has no frame rate.*frame_rate="):
        untimed.time_instruction()


def test_time_instruction():
    """The official wording, from the golden prompt."""
    prompt = read_json("vidlada", "prompts.json")["chat_prompts"]["mvbench_with_time"]
    line = next(line for line in prompt.splitlines() if line.startswith("The video lasts"))
    picture = Image.new("RGB", (2, 2))
    clip = Clip("a.mp4", [picture] * 3, [0, 2, 4], 25, 2.0, [0.0, 1.0, 2.0])
    assert clip.time_instruction() == line
    record = clip.to_dict()
    assert record["total_frames"] == 25 and record["indices"] == [0, 2, 4]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((0, 4, 4, 3), np.uint8), "at least one frame"),
        (np.zeros((4, 4, 3), np.uint8), r"\(F, H, W, 3\)"),
        (np.zeros((4, 4, 3, 5), np.uint8), r"frame 0 of the video array of shape \(4, 4, 3, 5\)"),
        ([], "has no frames"),
        (["none.png"], "frame 0 of the list of 1 frames: no image at 'none.png'"),
        ("none.mp4", "no video at 'none.mp4'"),
        (5, "must be a path"),
        (b"x", "must be a path"),
    ],
)
def test_what_is_no_video(source, message):
    with pytest.raises(MediaError, match=message):
        open_video(source)


def test_folders_that_cannot_be_read(tmp_path):
    with pytest.raises(MediaError, match=r"holds no image files to use as frames .*png"):
        open_video(tmp_path)
    Image.new("RGB", (4, 4)).save(tmp_path / "0.png")
    (tmp_path / "notes.txt").write_text("no frame")
    with pytest.raises(MediaError, match=r"holds 'notes.txt', which is no image .*remove it"):
        open_video(tmp_path)
    (tmp_path / "notes.txt").rename(tmp_path / "1.png")
    with pytest.raises(MediaError, match=r"frame 1 of the folder .*1.png' is not an image"):
        open_video(tmp_path)
    (tmp_path / "1.png").unlink()
    (tmp_path / "more.png").mkdir()
    with pytest.raises(MediaError, match=r"holds 'more.png'"):
        open_video(tmp_path)


def write_video(path, num_frames, rate=5, rotation=0, size=(32, 32)):
    """Frame number i has brightness 20 i, and its upper half is darker."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=Fraction(rate).limit_denominator(1001))
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.bit_rate = 4_000_000
        if rotation:
            stream.set_display_rotation(rotation)
        for index in range(num_frames):
            frame = np.full((size[1], size[0], 3), 20 * index % 240, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def test_video_files(tmp_path):
    path = tmp_path / "v.mp4"
    write_video(path, 10)
    clip = open_video(path, FrameSampling(4))
    assert np.allclose(shades(clip), [0, 60, 120, 180], atol=8)
    assert all(frame.mode == "RGB" and frame.size == (32, 32) for frame in clip.frames)
    assert (clip.indices, clip.total, clip.rate) == ([0, 3, 6, 9], 10, 5.0)
    assert clip.times == [0.0, 0.6, 1.2, 1.8]
    by_rate = open_video(str(path), FrameSampling(64, fps=1), is_timed=True)
    assert by_rate.indices == [0, 5] and by_rate.times == [0.0, 1.0]
    assert np.allclose(shades(by_rate), [0, 100], atol=8)
    repeated = open_video(path, FrameSampling(12, force_sample=True))
    assert repeated.indices == np.linspace(0, 9, 12, dtype=int).tolist()
    assert np.allclose(shades(repeated), [20 * index for index in repeated.indices], atol=8)
    write_video(path, 1)
    assert open_video(path, FrameSampling(64, fps=1)).indices == [0]
    write_video(path, 3, rate=30000 / 1001)
    assert open_video(path).rate == pytest.approx(29.97, abs=0.01)


def test_turned_videos_are_upright(tmp_path):
    path = tmp_path / "v.mp4"
    av = pytest.importorskip("av")
    picture = np.zeros((32, 64, 3), np.uint8)
    picture[:, :32] = 200  # bright on the left
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        stream.set_display_rotation(-90)  # to be shown turned clockwise
        for _ in range(2):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    frame = open_video(path).frames[0]
    assert frame.size == (32, 64)
    assert pixel(frame, 16, 8)[0] > 150 > 50 > pixel(frame, 16, 56)[0]  # bright at the top


def test_fewer_frames_than_the_file_promises(tmp_path, monkeypatch):
    """The frames that can be decoded are counted, and the choice is made anew."""
    av = pytest.importorskip("av")
    path = tmp_path / "v.mp4"
    write_video(path, 10)
    demux = av.container.InputContainer.demux

    class Opened:
        def __init__(self, container):
            self.container, self.streams = container, container.streams

        def demux(self, stream):
            packets = list(demux(self.container, stream))
            return packets + packets[:2]

        def decode(self, stream):
            return self.container.decode(stream)

        def __enter__(self):
            self.container.__enter__()
            return self

        def __exit__(self, *error):
            self.container.__exit__(*error)

    true_open = av.open
    monkeypatch.setattr(av, "open", lambda path: Opened(true_open(path)))
    clip = open_video(path, FrameSampling(3))
    assert clip.total == 10 and clip.indices == [0, 4, 9]
    assert np.allclose(shades(clip), [0, 80, 180], atol=8)


def test_video_files_that_cannot_be_read(tmp_path):
    av = pytest.importorskip("av")
    (tmp_path / "text.mp4").write_text("not a video")
    (tmp_path / "void.mp4").write_bytes(b"")
    write_video(tmp_path / "cut.mp4", 10)
    data = (tmp_path / "cut.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[: len(data) // 2])
    for name, reason in (
        ("text.mp4", "cannot decode the video"),
        ("void.mp4", "cannot decode the video"),
        ("cut.mp4", "no video stream"),
    ):
        with pytest.raises(MediaError, match=f"{name}'.*cut off") as caught:
            open_video(tmp_path / name)
        assert reason in str(caught.value)
    with av.open(str(tmp_path / "none.avi"), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        container.start_encoding()
    with pytest.raises(MediaError, match=r"none.avi' has no frames; pass a video with"):
        open_video(tmp_path / "none.avi")
    with av.open(str(tmp_path / "sound.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), "s16", "mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(MediaError, match=r"sound.wav' has no video stream \(it holds audio\)"):
        open_video(tmp_path / "sound.wav")


def test_video_files_need_pyav(tmp_path, monkeypatch):
    (tmp_path / "v.mp4").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(MediaError, match="needs PyAV; install"):
        open_video(tmp_path / "v.mp4")
