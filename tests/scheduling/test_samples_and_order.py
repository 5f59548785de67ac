import numpy as np
import pytest

from adaptiveload.scheduling.order import BUFFER_BLOCKS, EndlessOrder, held_out_mask
from adaptiveload.scheduling.samples import SampleTable
from adaptiveload.scheduling.shapes import LatentGeometry, Shape


def table_of(shapes, keys=None):
    keys = keys or [f"k{i}" for i in range(len(shapes))]
    frames, heights, widths = zip(*shapes, strict=True) if shapes else ((), (), ())
    return SampleTable.from_columns(keys, keys, frames, heights, widths, [7] * len(shapes), LatentGeometry())


def test_table_columns():
    table = table_of([(17, 64, 96), (1, 32, 32), (17, 64, 96)])
    assert table.shapes == (Shape(1, 32, 32), Shape(17, 64, 96))
    assert table.shape_ids.tolist() == [1, 0, 1]
    assert table.num_tokens.tolist() == [5 * 4 * 6, 4, 5 * 4 * 6]
    assert table.shape_tokens.tolist() == [4, 120]
    assert table.text_len.tolist() == [7, 7, 7]
    assert len(table) == 3


def test_table_refuses_shapes_that_fill_no_tokens_and_names_the_key():
    with pytest.raises(ValueError, match=r"'bad'.*18 frames"):
        table_of([(1, 32, 32), (18, 32, 32), (1, 33, 32)], ["good", "bad", "worse"])
    with pytest.raises(ValueError, match=r"'worse'.*height 33"):
        table_of([(1, 32, 32), (1, 33, 32)], ["good", "worse"])
    with pytest.raises(ValueError, match="no samples"):
        table_of([])
    with pytest.raises(ValueError, match="differ in length"):
        SampleTable.from_columns(["a"], ["a"], [1], [16], [16, 16], [1], LatentGeometry())


def test_mix_keeps_its_shares():
    table = SampleTable.from_mix("configs/mixes/mixed.yaml", 20_000, seed=1)
    share = (table.num_tokens == 256).mean()
    assert abs(share - 0.10) < 0.0064  # three standard deviations of a share of .1 among 20,000
    again = SampleTable.from_mix("configs/mixes/mixed.yaml", 20_000, seed=1)
    assert (again.num_tokens == table.num_tokens).all()
    assert (SampleTable.from_mix("configs/mixes/mixed.yaml", 20_000, seed=2).num_tokens != table.num_tokens).any()


def test_mix_is_checked(tmp_path):
    path = tmp_path / "mix.yaml"
    good = "{frames: 1, height: 256, width: 256, share: 2}"
    for text, message in (
        ("shapes: [{frames: 1}]", "'frames': 1.*does not give"),
        ("shapes: [7]", "7 does not give"),
        ("{}", "no shape mix"),
        ("17", "no shape mix"),
        ("shapes: []", "no shape mix"),
        (f"shapes: [{good}, {good.replace('share: 2', 'share: lots')}]", "'share': 'lots'.*does not give"),
        (f"shapes: [{good.replace('share: 2', 'share: .nan')}]", "share nan of 1x256x256 must be positive"),
        (f"shapes: [{good}, {good}]", "1x256x256 is given twice"),
        (f"shapes: [{good.replace('frames: 1', 'frames: 3')}]", "3 frames is not"),
        (f"shapes: [{good}]\norder: sorted", "order must be one of"),
        ("shapes: [{frames: 1", "cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message) as caught:
            SampleTable.from_mix(path, 4, seed=0)
        assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match=r"gone\.yaml cannot be read"):
        SampleTable.from_mix(tmp_path / "gone.yaml", 4, seed=0)
    with pytest.raises(ValueError, match="positive number"):
        SampleTable.from_mix("configs/mixes/mixed.yaml", 0, seed=0)


def test_each_epoch_is_another_permutation():
    ids = np.arange(1000, 1500)
    order = EndlessOrder(ids, seed=3, block_size=4)
    epochs = [order.window(epoch * 500, 500) for epoch in range(3)]
    for epoch, draws in enumerate(epochs):
        assert sorted(draws.ids.tolist()) == ids.tolist()
        assert (draws.epochs == epoch).all()
    assert (epochs[0].ids != epochs[1].ids).any()
    assert (EndlessOrder(ids, seed=4, block_size=4).window(0, 500).ids != epochs[0].ids).any()


def test_windows_join_up_across_epochs_and_out_of_the_blue():
    whole = EndlessOrder(np.arange(37), seed=1).window(0, 37 * 6)
    for start, count in ((150, 60), (0, 1), (36, 2), (30, 100), (5, 0)):
        part = EndlessOrder(np.arange(37), seed=1).window(start, count)
        assert (part.ids == whole.ids[start : start + count]).all()
        assert (part.epochs == whole.epochs[start : start + count]).all()


def test_order_keeps_neighbours_of_the_index_together():
    size = 8 * BUFFER_BLOCKS * 2
    ids = EndlessOrder(np.arange(size * 4), seed=0, block_size=2).window(0, size * 4).ids
    # A buffer is BUFFER_BLOCKS blocks of 2: it holds whole blocks only, and is shuffled inside.
    buffer = ids[: BUFFER_BLOCKS * 2]
    assert len(np.unique(buffer // 2)) == BUFFER_BLOCKS
    assert (np.diff(buffer) == 1).mean() < 0.05  # pairs of a block seldom stay next to each other


def test_repeats_are_told_apart():
    order = EndlessOrder(np.array([5, 6, 7]), seed=0, repeats=np.array([1, 3, 0]))
    draws = order.window(0, 8)
    assert order.epoch_size == 4
    for epoch in (0, 1):
        seen = sorted(zip(draws.ids[draws.epochs == epoch], draws.repeats[draws.epochs == epoch], strict=True))
        assert seen == [(5, 0), (6, 0), (6, 1), (6, 2)]


def test_order_refuses_what_it_cannot_draw_from():
    for ids, options, message in (
        (np.array([], int), {}, "empty"),
        (np.arange(2), {"repeats": np.array([0, 0])}, "empty"),
        (np.arange(2), {"repeats": np.array([1, -1])}, "repeats"),
        (np.arange(2), {"block_size": 0}, "schedule.order_block_size"),
    ):
        with pytest.raises(ValueError, match=message):
            EndlessOrder(ids, seed=0, **options)


def test_held_out_sources_are_whole_and_stable():
    sources = np.array([f"clip{i // 3}" for i in range(3000)])
    mask = held_out_mask(sources, 0.1, seed=5)
    assert mask.reshape(-1, 3).all(1).sum() == mask.reshape(-1, 3).any(1).sum()  # a source is on one side
    assert abs(mask.mean() - 0.1) < 0.03  # three standard deviations of .1 among 1,000 sources
    longer = held_out_mask(np.concatenate([sources, [f"new{i}" for i in range(500)]]), 0.1, seed=5)
    assert (longer[:3000] == mask).all()


def test_held_out_is_never_nothing_nor_all():
    assert held_out_mask(["a", "b", "b"], 1e-9, seed=0).any()
    assert not held_out_mask(["a", "b", "b"], 0.999999, seed=0).all()
    assert not held_out_mask(["a", "b"], 0, seed=0).any()
    with pytest.raises(ValueError, match="two sources"):
        held_out_mask(["a", "a"], 0.1, seed=0)
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        held_out_mask(["a", "b"], 1, seed=0)
