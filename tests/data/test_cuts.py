from pathlib import Path

import pytest

from adaptiveload.data.cuts import CutConfig, plan_cuts
from adaptiveload.scheduling.shapes import LatentGeometry, Shape


def config(*shapes, **changes):
    return CutConfig(shapes=tuple(Shape(*shape) for shape in shapes), **changes)


def planned_frames(num_frames, *shapes):
    cuts, _ = plan_cuts("clip.mp4", True, num_frames, 96, 128, config(*shapes))
    return sorted({cut.shape.frames for cut in cuts})


def test_a_clip_serves_every_length_that_it_has_and_stills_only_if_it_is_too_short():
    shapes = [(1, 48, 64), (5, 48, 64), (17, 48, 64)]
    assert {n: planned_frames(n, *shapes) for n in (1, 2, 4, 5, 16, 17, 33)} == {
        1: [1], 2: [1], 4: [1], 5: [5], 16: [5], 17: [5, 17], 33: [5, 17],
    }  # fmt: skip
    cuts, reason = plan_cuts("clip.mp4", True, 16, 96, 128, config((17, 48, 64)))
    assert cuts == []
    assert reason == "16 frames at 16 fps, the shortest shape has 17"


def test_a_picture_serves_shapes_of_one_frame():
    cuts, _ = plan_cuts("a.png", False, 1, 96, 128, config((1, 48, 64), (5, 48, 64), crops_per_shape=3))
    assert [cut.shape.frames for cut in cuts] == [1, 1, 1]


def test_start_times_are_spread_and_at_least_half_a_sample_apart():
    cuts, _ = plan_cuts("clip.mp4", True, 100, 96, 128, config((17, 48, 64), clips_per_shape=4))
    assert [cut.start for cut in cuts] == [0, 27, 55, 83]
    cuts, _ = plan_cuts("clip.mp4", True, 26, 96, 128, config((17, 48, 64), clips_per_shape=4))
    assert [cut.start for cut in cuts] == [0, 9]
    cuts, _ = plan_cuts("clip.mp4", True, 17, 96, 128, config((17, 48, 64), clips_per_shape=4))
    assert [cut.start for cut in cuts] == [0]


def test_the_configurations_that_come_along():
    folder = Path(__file__).parents[2] / "configs" / "data"
    found = {path.stem: path for path in folder.glob("*.yaml")}
    assert found.keys() == {"quickstart", "wan_480p", "wan2_2_ti2v"}
    for name, geometry, known in (
        ("quickstart", None, Shape(17, 64, 96)),
        ("wan_480p", None, Shape(81, 480, 832)),
        ("wan2_2_ti2v", LatentGeometry(48, spatial_stride=16), Shape(121, 704, 1280)),
    ):
        rules = CutConfig.load(found[name], geometry=geometry)
        assert known in [shape for group in rules.groups for shape in group]


@pytest.mark.parametrize(
    ("selection", "starts"),
    [("start", [0]), ("middle", [41]), ("sliding", [0, 17, 34, 51, 68]), ("spread", [0, 41, 83])],
)
def test_where_samples_begin(selection, starts):
    rules = config((17, 48, 64), clips_per_shape=3, selection=selection)
    cuts, _ = plan_cuts("clip.mp4", True, 100, 96, 128, rules)
    assert [cut.start for cut in cuts] == starts


def test_random_starts_are_the_same_each_time_and_never_twice():
    rules = config((17, 48, 64), clips_per_shape=3, selection="random")
    starts = {f"{i}.mp4": [cut.start for cut in plan_cuts(f"{i}.mp4", True, 24, 96, 128, rules)[0]] for i in range(50)}
    assert starts["7.mp4"] == [cut.start for cut in plan_cuts("7.mp4", True, 24, 96, 128, rules)[0]]
    assert all(len(set(found)) == 3 and found == sorted(found) for found in starts.values())
    assert {start for found in starts.values() for start in found} == set(range(8))  # all that fit


def test_crops_have_the_shape_of_the_target_and_stay_inside():
    rules = config((5, 64, 64), (5, 48, 80), clips_per_shape=5, max_crop=0.5, min_crop_scale=0.6)
    cuts, _ = plan_cuts("clip.mp4", True, 200, 135, 243, rules)
    assert len(cuts) == 10
    for cut in cuts:
        left, top, right, bottom = cut.box
        assert 0 <= left < right <= 243
        assert 0 <= top < bottom <= 135
        assert (right - left) / (bottom - top) == pytest.approx(cut.shape.width / cut.shape.height)
        # Not enlarged, and at least 0.6 of the largest crop.
        assert bottom - top >= cut.shape.height - 1e-9
        assert right - left >= cut.shape.width - 1e-9
    assert len({cut.box for cut in cuts}) == 10
    assert cuts[0].box == pytest.approx((54, 0, 189, 135))  # first: largest, centred


def test_the_same_source_gives_the_same_crops():
    rules = config((5, 64, 64), clips_per_shape=3)
    first = plan_cuts("a.mp4", True, 50, 100, 110, rules)
    assert first == plan_cuts("a.mp4", True, 50, 100, 110, rules)
    assert first != plan_cuts("b.mp4", True, 50, 100, 110, rules)


@pytest.mark.parametrize(
    ("height", "width", "changes", "reason"),
    [
        (100, 300, {}, "max_crop"),
        (300, 100, {}, "max_crop"),
        (63, 63, {}, "too small"),
        (64, 64, {}, ""),
        (48, 48, {"max_upscale": 1.34}, ""),
        (100, 300, {"max_crop": 0.7}, ""),
    ],
)
def test_limits_of_cropping_and_enlarging(height, width, changes, reason):
    cuts, why = plan_cuts("a.png", False, 1, height, width, config((1, 64, 64), **changes))
    assert bool(cuts) == (not reason)
    assert reason in why


def test_config_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("fps: 8\nshapes:\n  - [1, 64, 64]\n  - [5, 64, 96]\nmax_crop: 0\n")
    assert CutConfig.load(path) == config((1, 64, 64), (5, 64, 96), fps=8, max_crop=0)
    assert CutConfig.load(path, "9,32,48").shapes == (Shape(9, 32, 48),)
    assert CutConfig.load(None, "1,32,48; 5,16,16") == config((1, 32, 48), (5, 16, 16))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shapes: [[1, 480, 854]]", "width 854 is not a multiple of 16"),
        ("shapes: [[1, 920, 1376]]", "height 920 is not a multiple of 16"),
        ("shapes: [[8, 64, 64]]", r"8 frames is not 4k\+1"),
        ("shapes: [[1, 64]]", "is not frames, height, width"),
        ("shapes: [[1, 64, wide]]", "is not frames, height, width"),
        ("shapes: [[0, 64, 64]]", "must be positive"),
        ("fps: 16", "`shapes` is empty"),
        ("", "`shapes` is empty"),
        ("shape: [[1, 64, 64]]", r"unknown \['shape'\]; the keys are shapes, budgets"),
        ("[1, 2]", "unknown list"),
        ("{shapes: [[1, 64, 64]], fps: fast}", "`fps` is 'fast', expected a number"),
        ("{shapes: [[1, 64, 64]], clips_per_shape: 1.5}", "`clips_per_shape` is 1.5, expected an integer"),
        ("{shapes: [[1, 64, 64]], clips_per_shape: 0}", "`clips_per_shape` must be positive"),
        ("{shapes: [[1, 64, 64]], fps: 0}", "`fps` must be positive"),
        ("{shapes: [[1, 64, 64]], max_crop: 1.0}", "`max_crop` must be at least 0 and below 1"),
        ("{shapes: [[1, 64, 64]], min_crop_scale: 0}", "`min_crop_scale` must be above 0"),
        ("{shapes: 5}", "`shapes` is 5, expected a list"),
    ],
)
def test_bad_config_names_the_key(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        CutConfig.load(path)
