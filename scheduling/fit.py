"""Fits of the cost and memory models to a shape benchmark, robust to slow first runs, spikes and odd shapes.

Legend: `n` points; a point is a micro-batch of `batch_size` samples of `seq_len` tokens.

Residuals are relative, because a planner needs every length priced equally well. Repeats of a point become their
median first; what is far from it is thrown out and counted. Losses between points are quadratic up to `ROBUST`, then
linear, so that a whole point measured on a stalled machine cannot bend a curve.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from adaptiveload.scheduling.cost import CostModel, PowerCost, TwoTermCost
from adaptiveload.scheduling.memory import MemoryModel

FloatArray = NDArray[np.float64]

ROBUST = (
    0.10  # relative residual from which a point weighs less: above what a right law misses, under what a stall adds
)
OUTLIER_MADS, OUTLIER_SHARE = 5.0, 0.10  # a repeat is thrown out if it is off its median by more than both
EXPONENT_RANGE = (0.8, 2.3)  # cost grows at least nearly like a matrix product, at most a little over attention
MIN_POINTS, MIN_LENGTHS = 5, 3
# A floor holds up to a little above it; the law alone from twice the floor on.
ABOVE, LAUNCH_FREE = 1.02, 2.0
GROWTH = 1.05  # the dearest third must take this many times the cheapest third, or there is nothing to fit


@dataclass(frozen=True, eq=False)
class Points:
    """Median seconds of each point, in order of length and batch size.

    Attributes:
        batch_size, seq_len: int64 [n].
        seconds: float64 [n], median of the repeats that were kept.
        spread: float64 [n], relative median absolute deviation of them, times 1.4826.
        num_rows, num_first, num_outliers: Rows read, first runs dropped, and outliers thrown out.
    """

    batch_size: NDArray[np.int64]
    seq_len: NDArray[np.int64]
    seconds: FloatArray
    spread: FloatArray
    num_rows: int
    num_first: int
    num_outliers: int

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def columns(self) -> FloatArray:
        """float64 [n, 4]: 1, samples, tokens and tokens squared of a micro-batch, as the cost law adds them up."""
        batch, length = self.batch_size.astype(np.float64), self.seq_len.astype(np.float64)
        return np.stack([np.ones_like(batch), batch, batch * length, batch * length * length], 1)

    @property
    def correlations(self) -> tuple[float, float]:
        """Pearson R of the seconds with the tokens of a micro-batch, and with the sum of its squared lengths."""
        tokens, squares = (float(np.corrcoef(self.seconds, self.columns[:, i])[0, 1]) for i in (2, 3))
        return tokens, squares

    def take(self, mask: NDArray[np.bool_]) -> "Points":
        """The points where `mask` is true."""
        picked = {name: getattr(self, name)[mask] for name in ("batch_size", "seq_len", "seconds", "spread")}
        return replace(self, **picked)


def points_of(batch_size: ArrayLike, seq_len: ArrayLike, repeat: ArrayLike, seconds: ArrayLike) -> Points:
    """Medians of a benchmark's rows, one row a timed run; `repeat` 0 is the first run of a point, which is dropped.

    Raises:
        ValueError: If the columns are empty or differ in length, or hold what is not a positive finite number.
    """
    columns = [np.asarray(column, np.float64) for column in (batch_size, seq_len, repeat, seconds)]
    if not len(columns[0]) or len({len(column) for column in columns}) > 1:
        raise ValueError(f"measurements: columns of {[len(column) for column in columns]} rows; need equal and some")
    for name, column in zip(("batch size", "tokens", "seconds"), (columns[0], columns[1], columns[3]), strict=True):
        bad = np.flatnonzero(~(np.isfinite(column) & (column > 0)))
        if len(bad):
            raise ValueError(
                f"measurements: {name} is {column[bad[0]]} in row {bad[0]} ({len(bad)} such rows); "
                "every row needs positive numbers"
            )
    batch, length, order, times = columns
    points, num_first, num_outliers = [], 0, 0
    for pair in np.unique(np.stack([length, batch], 1), axis=0):
        rows = (length == pair[0]) & (batch == pair[1])
        is_first = rows & (order == 0)
        if (rows & ~is_first).any():
            num_first += int(is_first.sum())
            rows &= ~is_first
        values = times[rows]
        median = float(np.median(values))
        mad = 1.4826 * float(np.median(np.abs(values - median)))
        kept = values[np.abs(values - median) <= max(OUTLIER_MADS * mad, OUTLIER_SHARE * median)]
        num_outliers += len(values) - len(kept)
        median = float(np.median(kept))
        points.append((pair[1], pair[0], median, 1.4826 * float(np.median(np.abs(kept - median))) / median))
    batches, lengths, medians, spreads = np.array(points).T
    return Points(
        np.rint(batches).astype(np.int64),
        np.rint(lengths).astype(np.int64),
        medians,
        spreads,
        len(times),
        num_first,
        num_outliers,
    )


def check_points(points: Points) -> None:
    """Raise ValueError, in words, for points that no cost law can be fitted to."""
    lengths = np.unique(points.seq_len)
    if len(lengths) < MIN_LENGTHS:
        raise ValueError(
            f"cannot fit a cost law to {len(lengths)} length{'s' * (len(lengths) > 1)} of samples "
            f"({', '.join(map(str, lengths))} tokens): measure at least {MIN_LENGTHS}, far apart"
        )
    if len(points) < MIN_POINTS:
        raise ValueError(f"cannot fit a cost law to {len(points)} points: measure at least {MIN_POINTS}")
    columns = points.columns
    if _rank(columns[:, [0, 2, 3]] / points.seconds[:, None]) < 3:
        raise ValueError(
            "cannot tell the fixed time from the time per token: tokens and batch size are tied in these points; "
            "measure some lengths at several batch sizes"
        )
    third = max(len(points) // 3, 1)
    # By tokens squared or by tokens: many short samples are much work that has few tokens squared.
    orders = [points.seconds[np.argsort(columns[:, i], kind="stable")] for i in (2, 3)]
    growth = max(float(np.median(seconds[-third:]) / np.median(seconds[:third])) for seconds in orders)
    if growth < 1 / GROWTH:
        raise ValueError(f"time falls as the work grows ({growth:.2f} times from the least to the most): no cost law")
    if growth < GROWTH:
        raise ValueError(
            f"time does not grow with the work ({growth:.2f} times from the least to the most): every point is as "
            "fast as kernels can be launched; measure larger ones"
        )


@dataclass(frozen=True)
class TwoTermFit:
    """A fitted cost law: `cost`, standard errors of its coefficients by name, and notes on what could not be told."""

    cost: TwoTermCost
    standard_errors: dict[str, float]
    notes: tuple[str, ...]


def fit_two_term(points: Points) -> TwoTermFit:
    """max(launch_floor, a + c0*B + b1*sum(S) + b2*sum(S^2)) with no negative term.

    The floor is looked for among the measured times: each is tried, and the law is fitted to the points above twice
    the floor, or where these are too few, to all above it. Between the floor and twice the floor a micro-batch is
    launch-bound in part, so it takes longer than either the floor or the law, and its repeats scatter.

    Raises:
        ValueError: As `check_points`.
    """
    check_points(points)
    columns, notes = points.columns, list[str]()
    use = np.array([True, True, True, True])
    if _rank(columns / points.seconds[:, None]) < 4:
        use[1] = False
        notes.append("c0 cannot be told from the other terms here and is 0: measure lengths at several batch sizes")
    floor, coefficients, active = _floored_fit(columns[:, use], points.seconds, points.seq_len, (LAUNCH_FREE, ABOVE))
    full = np.zeros(4)
    full[use] = coefficients
    errors = np.zeros(4)
    errors[use] = _standard_errors(columns[active][:, use], points.seconds[active], coefficients)
    names = ("a_us", "c0_us", "b1_us", "b2_us")
    cost = TwoTermCost(floor * 1e6, *(full * 1e6).tolist())
    return TwoTermFit(cost, dict(zip(names, (errors * 1e6).tolist(), strict=True)), tuple(notes))


@dataclass(frozen=True)
class PowerFit:
    """The paper's law: `cost`, and the 95 % interval of its exponent."""

    cost: PowerCost
    exponent_interval: tuple[float, float]
    notes: tuple[str, ...]


def fit_power(points: Points) -> PowerFit:
    """A + b*B*S^p by nonlinear least squares, a >= 0, b > 0, p within `EXPONENT_RANGE`.

    Every exponent on a grid is fitted linearly first, and the best starts the nonlinear search: from an arbitrary
    start it ends in a wrong valley, with b < 0, even on noise-free data.

    Raises:
        ValueError: As `check_points`.
    """
    check_points(points)
    return _fit_power(points)


def _fit_power(points: Points) -> PowerFit:
    from scipy.optimize import least_squares  # 0.3 s to import, and few runs fit

    batch, times = points.batch_size.astype(np.float64), points.seconds
    middle = float(np.exp(np.mean(np.log(points.seq_len))))
    ratio = points.seq_len / middle

    def start(exponent: float) -> tuple[float, FloatArray]:
        columns = np.stack([np.ones_like(batch), batch * ratio**exponent], 1)
        coefficients = relative_nnls(columns, times)
        return robust_loss(columns @ coefficients / times - 1), coefficients

    low, high = EXPONENT_RANGE
    grid = np.minimum(np.arange(low, high + 0.001, 0.05), high)  # rounding ends it above
    best = min(grid.tolist(), key=lambda exponent: start(exponent)[0])
    a, b = start(best)[1].tolist()
    b = max(b, 1e-12)
    scale = np.array([max(a, b), b, 1.0])

    def residuals(x: FloatArray) -> FloatArray:
        fixed, slope, exponent = x * scale
        relative: FloatArray = (fixed + slope * batch * ratio**exponent) / times - 1
        return relative

    result = least_squares(
        residuals,
        np.array([a, b, best]) / scale,
        bounds=([0, 0, low], [np.inf, np.inf, high]),
        loss="huber",
        f_scale=ROBUST,
        xtol=1e-12,
        ftol=1e-12,
    )
    a, b, exponent = (result.x * scale).tolist()
    weighted = residuals(result.x)
    freedom = max(len(points) - 3, 1)
    covariance = np.linalg.pinv(result.jac.T @ result.jac) * float(np.sum(weighted**2)) / freedom
    half = 1.96 * math.sqrt(max(float(covariance[2, 2]), 0.0))
    notes: tuple[str, ...] = ()
    if not low + 1e-3 < exponent < high - 1e-3:
        notes = (f"the exponent ran to the bound of {low} to {high}: a power law does not describe these times",)
    cost = PowerCost(a * 1e6, b * 1e6 / middle**exponent, exponent)
    return PowerFit(cost, (max(exponent - half, low), min(exponent + half, high)), notes)


def power_law_of(cost: CostModel, seq_lens: Sequence[int], memory_limit_tokens: int) -> PowerCost:
    """The power law nearest to `cost` over micro-batches of these lengths, one sample up to the memory limit."""
    lengths = np.unique(np.asarray(seq_lens, np.int64))
    if len(lengths) < MIN_LENGTHS:  # too few to bend: a line through what there is
        lengths = np.unique(np.concatenate([lengths, lengths * 2, lengths * 4]))
    pairs = {
        (size, length)
        for length in lengths.tolist()
        for size in (1, max(memory_limit_tokens // length // 2, 1), max(memory_limit_tokens // length, 1), 2)
    }
    batch, length = np.array(sorted(pairs), np.int64).T
    per_sample = cost.sample_us(length, np.zeros_like(length))
    # Without the launch floor: under it all lengths cost the same, and batch sizes would follow from nothing.
    seconds = (cost.a_us + batch * per_sample) / 1e6
    return _fit_power(Points(batch, length, seconds, np.zeros(len(batch)), 0, 0, 0)).cost


def fit_memory(batch_size: ArrayLike, seq_len: ArrayLike, reserved_bytes: ArrayLike) -> MemoryModel:
    """Memory model of measured peaks; memory is repeatable, so the largest of a point's repeats counts.

    The optimizer's own peak hides small micro-batches: the least bytes are a floor of the model like the launch floor
    of a time, and only the points above it are fitted.

    Raises:
        ValueError: If there are fewer than 3 points, or bytes do not grow with tokens.
    """
    batch, length, peaks = (np.asarray(column, np.float64) for column in (batch_size, seq_len, reserved_bytes))
    pairs, where = np.unique(np.stack([batch, length], 1), axis=0, return_inverse=True)
    most = np.zeros(len(pairs))
    np.maximum.at(most, where.reshape(-1), peaks)
    if len(pairs) < 3:
        raise ValueError(f"cannot fit a memory model to {len(pairs)} points: measure at least 3")
    samples, tokens = pairs[:, 0], pairs[:, 0] * pairs[:, 1]
    columns = np.stack([np.ones_like(samples), tokens, samples], 1)
    if _rank(columns) < 3:
        columns = columns[:, :2]
    _, coefficients, _ = _floored_fit(columns, most, pairs[:, 1], (ABOVE,))
    static, token_bytes, sample_bytes = [*coefficients.tolist(), 0.0][:3]
    if not token_bytes:
        raise ValueError("memory does not grow with tokens in these measurements: no memory model")
    return MemoryModel(static, token_bytes, sample_bytes)


def relative_errors(points: Points, cost: TwoTermCost | PowerCost) -> FloatArray:
    """Predicted over measured seconds less 1, float64 [n]."""
    per_sample = cost.sample_us(points.seq_len, np.zeros_like(points.seq_len))
    errors: FloatArray = cost.micro_batch_us(points.batch_size * per_sample) / 1e6 / points.seconds - 1
    return errors


def held_out_errors(points: Points, fit: Callable[[Points], TwoTermCost | PowerCost]) -> FloatArray:
    """Relative error of each point under the law `fit` without its length, float64 [n]; NaN where too few are left."""
    errors = np.full(len(points), np.nan)
    for length in np.unique(points.seq_len):
        held = points.seq_len == length
        try:
            errors[held] = relative_errors(points.take(held), fit(points.take(~held)))
        except ValueError:  # this length is one of the few that the fit needs: nothing is known about it
            continue
    return errors


def _floored_fit(
    columns: FloatArray, values: FloatArray, lengths: NDArray[np.generic], margins: Sequence[float]
) -> tuple[float, FloatArray, NDArray[np.bool_]]:
    """Floor, coefficients, and which points they are fitted to: those above the first of `margins` times the floor
    that leaves enough of them.
    """

    def tells(active: NDArray[np.bool_]) -> bool:
        enough = active.sum() > columns.shape[1] and len(np.unique(lengths[active])) >= MIN_LENGTHS
        return bool(enough) and _rank(columns[active] / values[active, None]) == columns.shape[1]

    everything = np.ones(len(values), bool)
    best = (np.inf, 0.0, np.zeros(columns.shape[1]), everything)
    for floor in [0.0, *np.unique(values).tolist()]:
        above = [values > floor * margin for margin in margins] if floor else [everything]
        active = next((mask for mask in above if tells(mask)), None)
        if active is None:
            if floor:
                break
            active = everything
        coefficients = relative_nnls(columns[active], values[active])
        loss = robust_loss(np.maximum(floor, columns @ coefficients) / values - 1)
        if loss < best[0] * 0.98:  # a floor must earn its place
            best = (loss, floor, coefficients, active)
    return best[1:]


def relative_nnls(columns: FloatArray, values: FloatArray, weights: FloatArray | None = None) -> FloatArray:
    """Non-negative coefficients of least robust relative error: iteratively reweighted least squares.

    Args:
        columns: float64 [n, coefficients].
        values: float64 [n], positive.
        weights: float64 [n], how many rows each row counts for; None is 1.
    """
    from scipy.optimize import nnls  # 0.3 s to import, and few runs fit

    given = np.ones(len(values)) if weights is None else np.sqrt(weights)
    rows = columns / values[:, None]
    scale = np.maximum(rows.max(axis=0), 1e-300)
    rows = rows / scale
    trust = np.ones(len(values))
    coefficients = np.zeros(columns.shape[1])
    for _ in range(30):
        root = given * trust
        coefficients, _ = nnls(rows * root[:, None], root)
        residuals = np.abs(rows @ coefficients - 1)
        updated = np.sqrt(np.minimum(1.0, ROBUST / np.maximum(residuals, 1e-12)))
        if np.abs(updated - trust).max() < 1e-6:
            break
        trust = updated
    scaled: FloatArray = coefficients / scale
    return scaled


def robust_loss(residuals: FloatArray, weights: FloatArray | float = 1.0) -> float:
    """Sum of Huber's loss of relative residuals."""
    size = np.abs(residuals)
    return float((weights * np.where(size <= ROBUST, size**2, 2 * ROBUST * size - ROBUST**2)).sum())


def _standard_errors(columns: FloatArray, values: FloatArray, coefficients: FloatArray) -> FloatArray:
    rows = columns / values[:, None]
    positive = coefficients > 0
    errors = np.zeros(len(coefficients))
    scale = rows[:, positive].max(axis=0)
    scaled = rows[:, positive] / scale
    freedom = max(len(values) - int(positive.sum()), 1)
    variance = float(((rows @ coefficients - 1) ** 2).sum()) / freedom
    errors[positive] = np.sqrt(np.diag(np.linalg.pinv(scaled.T @ scaled)) * variance) / scale
    return errors


def _rank(columns: FloatArray) -> int:
    """Rank of columns of any scale; a condition number over 1e6 counts as tied."""
    largest = np.abs(columns).max(axis=0)
    return int(np.linalg.matrix_rank(columns / np.where(largest > 0, largest, 1), tol=1e-6))
