import time
from dataclasses import dataclass
from threading import Barrier, Thread

import pytest

import dlm_decode
from dlm_decode import samplers, stages, vision
from dlm_decode.errors import InvalidInputError, UnknownNameError
from dlm_decode.registry import Registry, describe
from dlm_decode.samplers.baseline import Baseline


def test_builtins_are_found():
    assert "baseline" in samplers.names()
    assert "stride" in stages.names()
    assert samplers.get("baseline") is Baseline is samplers.Baseline
    assert dlm_decode.samplers is samplers


def test_spec_and_instance():
    assert samplers.make("baseline:remasking=margin") == Baseline(remasking="margin")
    assert samplers.make("baseline", {"remasking": "random"}) == Baseline(remasking="random")
    instance = Baseline()
    assert samplers.make(instance) is instance
    options = {"remasking": "low_confidence", "alg_temp": 0.0}
    assert describe(instance) == {"name": "baseline", "options": options}
    assert stages.make("stride:keep_ratio=0.25").keep_ratio == 0.25


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("basline", "Did you mean 'baseline'"),
        ("baseline:remaskin=margin", "Did you mean 'remasking'"),
        ("baseline:remasking=marginal", "Did you mean 'margin'"),
        ("baseline:margin", "name:key=value"),
        ("baseline:alg_temp=0.5, alg_temp =0.2", "'alg_temp' stands twice"),
        ("BASELINE", "Did you mean 'baseline'"),
        ("lown:guard_exempt_special=maybe", "must be true or false, got 'maybe'"),
        ("fast_dllm:factor=many", "factor must be a number of at least 0"),
        (3, "must be a name, a spec such as 'name:key=value' or an instance, got 3"),
        (None, "got None"),
    ],
)
def test_mistakes_are_named(spec, message):
    with pytest.raises(InvalidInputError, match=message):
        samplers.make(spec)


def test_options_beside_an_instance_and_classes_are_refused():
    with pytest.raises(InvalidInputError, match="set them on the instance"):
        samplers.make(Baseline(), {"remasking": "margin"})
    with pytest.raises(InvalidInputError, match="pass an instance"):
        samplers.make(Baseline)


def test_stage_values_are_checked():
    for value in (0, 1.5, -1, "x"):
        with pytest.raises(InvalidInputError, match="keep_ratio"):
            stages.make("stride", {"keep_ratio": value})


def test_third_party_sampler_registers_in_one_file():
    @samplers.register_sampler("mine")
    @dataclass(frozen=True)
    class Mine(Baseline):
        pass

    assert "mine" in samplers.names()
    assert isinstance(samplers.make("mine:remasking=entropy"), Mine)
    with pytest.raises(InvalidInputError, match="is taken by"):
        samplers.register_sampler("mine")(Baseline)
    assert Baseline.name == "baseline"


def test_unknown_name_lists_what_exists():
    with pytest.raises(UnknownNameError) as caught:
        samplers.get("nothing like it")
    assert "baseline" in caught.value.available


def test_threads_that_load_at_once_all_find_everything():
    registry, start, found = Registry("sampler", "dlm_decode.samplers", "none"), Barrier(4), []

    def load():
        time.sleep(0.05)
        registry._classes["late"] = Baseline

    def look():
        start.wait()
        found.append(registry.names())

    registry._load_all = load
    threads = [Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["late"]] * 4


def test_one_stage_is_a_list_of_one():
    stride = stages.make("stride:keep_ratio=0.5")
    assert vision.make_all("stride:keep_ratio=0.5") == vision.make_all(stride) == [stride]
    assert vision.make_all(None) == vision.make_all(()) == []
    assert vision.make_all(["stride:keep_ratio=0.5", stride]) == [stride, stride]
    with pytest.raises(InvalidInputError, match="must be a stage, its name or spec"):
        vision.make_all(3)  # type: ignore[arg-type]
