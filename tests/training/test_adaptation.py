"""What a refit says for the log."""

from collections import Counter
from types import SimpleNamespace

import numpy as np

from adaptiveload.scheduling.cost import TwoTermCost
from adaptiveload.training.adaptation import Adaptation
from adaptiveload.training.cost import CostConfig

LENGTHS = (4, 18, 64)


def adaptation_after(seconds_of_a_token: float, fixed_s: float) -> tuple[dict, list[str]]:
    """The update of a refit, and its lines, once micro-batches of an H200's prior have taken so long."""
    schedule = SimpleNamespace(
        table=SimpleNamespace(computed_tokens=lambda: np.array(LENGTHS)),
        settings=SimpleNamespace(rank_speed="off", policy="balanced"),
        policy=None,
        history=SimpleNamespace(updates=[]),
    )
    law = TwoTermCost(launch_floor_us=0.0, a_us=1e4, c0_us=1.0, b1_us=0.01, b2_us=0.0)
    adaptation = Adaptation(CostConfig(), schedule, law, SimpleNamespace(world_size=1), plans_ahead=0)
    for number in range(60):
        length, count = LENGTHS[number % len(LENGTHS)], 1 + number % 4
        adaptation.online.observe(0, fixed_s + count * length * seconds_of_a_token, Counter({length: count}), 0.0)
    return adaptation._refit(10)


def test_a_refit_is_told_whichever_part_of_the_law_has_moved() -> None:
    """On a busy machine a toy's micro-batches all take as long: all is in the fixed part, and tokens cost nothing."""
    for token_s, fixed_s in ((1e-3, 1e-4), (0.0, 0.04)):
        update, lines = adaptation_after(token_s, fixed_s)
        assert len(lines) == 1
        assert lines[0].startswith("cost law from step 10: prices x ")
    assert max(update["cost"]["prices_us"]) == 1
    assert max(update["cost"]["launch_floor_us"], update["cost"]["a_us"]) > 30_000
