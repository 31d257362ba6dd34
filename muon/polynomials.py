"""The odd quintic polynomials of the Newton-Schulz iteration, and the proof that a schedule of them is safe.

One step maps every singular value s of a matrix to p(s) = a s + b s³ + c s⁵ and leaves its singular vectors alone. A
schedule is a sequence of such steps, written as triples (a, b, c).
"""

import math
import sys
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from types import MappingProxyType
from typing import Literal, TypeAlias

Triple: TypeAlias = tuple[float, float, float]
Preset: TypeAlias = Literal["keller_jordan", "quintic", "polar_express", "converged"]
Coefficients: TypeAlias = Triple | Preset | Sequence[Triple]

# Singular values over the Frobenius norm lie in (0, 1]; rounding in bf16 pushes them to at most 1.01.
LARGEST_SINGULAR_VALUE = 1.01

EPSILON = sys.float_info.epsilon

KELLER_JORDAN: Triple = (3.4445, -4.7750, 2.0315)  # https://kellerjordan.github.io/posts/muon/

# The quintic Newton-Schulz step with p(1) = 1, p'(1) = p''(1) = 0: cubic convergence once values are near 1.
CONVERGING_TAIL: Triple = (15 / 8, -10 / 8, 3 / 8)

# Per-step coefficients in use by modded-nanogpt and microsoft/dion (dion/newton_schulz_triton.py), after
# https://leloykun.github.io/ponder/muon-opt-coeffs/
QUINTIC: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

# Amsel et al., "The Polar Express", https://arxiv.org/abs/2505.16932, cushion 2 and safety factor 2e-2, as computed for
# modded-nanogpt. They expect their input divided by a further 1.02, which is folded into the first step here.
_SAFETY = 1.02
POLAR_EXPRESS: tuple[Triple, ...] = (
    (8.156554524902461 / _SAFETY, -22.48329292557795 / _SAFETY**3, 15.878769915207462 / _SAFETY**5),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

# Polar Express, then the tail until every singular value from 1e-3 up is within 1e-3 of 1.
CONVERGED: tuple[Triple, ...] = (*POLAR_EXPRESS, *(CONVERGING_TAIL,) * 2)

PRESETS: Mapping[str, tuple[Triple, ...]] = MappingProxyType(
    {"keller_jordan": (KELLER_JORDAN,) * 5, "quintic": QUINTIC, "polar_express": POLAR_EXPRESS, "converged": CONVERGED}
)


def schedule(ns_coefficients: Coefficients, ns_steps: int) -> tuple[Triple, ...]:
    """The steps of an iteration, one triple each.

    A single triple, and the preset ``"keller_jordan"``, is repeated ``ns_steps`` times. A sequence of triples is taken
    as it is: its length is the number of steps. The other presets are made for five steps (``"converged"`` for seven):

    - For fewer, a preset keeps its first steps. Those of Polar Express are greedy, each the best for the range that the
      steps before it leave, so that any number of them is the best schedule of its length; Quintic's first four are
      closer to 1 than its last four. ``"converged"`` is never cut: it would not be.
    - For more, it goes on with the converging tail, whose step has p(1) = 1 and p'(1) = p''(1) = 0: near 1 it cubes the
      distance to 1. Repeating the last step instead would not converge: that step balances the range it was made for.

    Args:
        ns_coefficients: a triple (a, b, c), a preset's name, or a sequence of triples.
        ns_steps: number of steps.

    Returns:
        A triple (a, b, c) of floats for each step.

    Raises:
        ValueError: an unknown preset, triples that are not three finite numbers, a number of steps outside
            0 .. 99, or a schedule that would turn some singular value's sign around, extinguish it, or inflate it past
            2; the message names the interval that singular values reach.

    Example:
        >>> from muon.polynomials import schedule
        >>> schedule((3.4445, -4.775, 2.0315), ns_steps=2)
        ((3.4445, -4.775, 2.0315), (3.4445, -4.775, 2.0315))

    Sources: Keller Jordan, https://kellerjordan.github.io/posts/muon/; Amsel et al., "The Polar Express",
    https://arxiv.org/abs/2505.16932; https://leloykun.github.io/ponder/muon-opt-coeffs/ (Quintic).
    """
    if not (isinstance(ns_steps, Integral) and 0 <= ns_steps < 100):
        raise ValueError(f"ns_steps should be an integer between 0 and 99 but is: {ns_steps}")
    steps = _steps(ns_coefficients, ns_steps)
    _certify(steps)
    return steps


def output_range(steps: Sequence[Triple]) -> tuple[float, float]:
    """Exact smallest and largest value that the schedule takes over singular values in (0, 1.01].

    A continuous function maps an interval onto an interval whose ends lie at its ends or critical points, so the image
    of the whole schedule is found step by step; the lower end is 0, the limit at 0, unless the schedule goes negative.

    Args:
        steps: a triple (a, b, c) for each step, as from ``schedule``; they are not checked.

    Returns:
        (lowest, highest).

    Example:
        >>> from muon.polynomials import output_range, schedule
        >>> low, high = output_range(schedule("polar_express", 5))
        >>> low, round(high, 3)
        (0.0, 1.141)

    Source: the extreme value theorem; the critical points of a s + b s³ + c s⁵ are roots of a quadratic in s².
    """
    low, high = 0.0, LARGEST_SINGULAR_VALUE
    for triple in steps:
        low, high = _image(triple, low, high)
    return low, high


def _steps(ns_coefficients: Coefficients, ns_steps: int) -> tuple[Triple, ...]:
    if isinstance(ns_coefficients, str):
        return _named_steps(ns_coefficients, ns_steps)
    if not hasattr(ns_coefficients, "__len__"):
        return (_triple(ns_coefficients),)  # raises
    if len(ns_coefficients) == 3 and all(isinstance(c, Real) for c in ns_coefficients):
        return (_triple(ns_coefficients),) * ns_steps
    return tuple(_triple(triple) for triple in ns_coefficients)


def _named_steps(name: str, ns_steps: int) -> tuple[Triple, ...]:
    if name not in PRESETS:
        raise ValueError(f"ns_coefficients names no preset: {name!r}; presets are {', '.join(map(repr, PRESETS))}")
    if name == "keller_jordan":
        return (KELLER_JORDAN,) * ns_steps
    preset = PRESETS[name]
    length = max(ns_steps, len(preset)) if name == "converged" else ns_steps
    return (preset + (CONVERGING_TAIL,) * length)[:length]


def _triple(values: object) -> Triple:
    try:
        a, b, c = (float(value) for value in values)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ValueError(
            f"ns_coefficients should be a preset's name, three numbers or a sequence of such triples; found: {values!r}"
        ) from None
    if not all(map(math.isfinite, (a, b, c))):
        raise ValueError(f"ns_coefficients should be finite but are: {(a, b, c)}")
    return a, b, c


def _certify(steps: Sequence[Triple]) -> None:
    """Raise unless the schedule stays in (0, 2) for every singular value in (0, 1.01]."""
    low, high = 0.0, LARGEST_SINGULAR_VALUE
    for number, triple in enumerate(steps):
        keeps_signs = _is_positive(triple, high)
        low, high = _image(triple, low, high)
        if not keeps_signs:
            raise ValueError(
                f"ns_coefficients turn updates around: after step {number + 1}, {triple}, singular values "
                f"in (0, {LARGEST_SINGULAR_VALUE}] reach [{low:.4g}, {high:.4g}], which should be positive"
            )
    if high >= 2:
        raise ValueError(
            f"ns_coefficients blow updates up: after all {len(steps)} steps, singular values in "
            f"(0, {LARGEST_SINGULAR_VALUE}] reach [{low:.4g}, {high:.4g}], which should lie inside (0, 2)"
        )


def _is_positive(triple: Triple, high: float) -> bool:
    """Whether a s + b s³ + c s⁵ > 0 on (0, high], by more than the rounding of the test.

    It is 0 at 0, so on (0, high] it is lowest at a critical point, at the end, or, rising, towards 0.
    """
    a, b, c = triple
    points = [high, *(s for s in _critical_points(a, b, c) if 0 < s < high)]
    return all(a + s * s * (b + s * s * c) > 8 * EPSILON * (abs(a) + s * s * (abs(b) + s * s * abs(c))) for s in points)


def _image(triple: Triple, low: float, high: float) -> tuple[float, float]:
    """Exact range of a s + b s³ + c s⁵ over [low, high]."""
    a, b, c = triple
    points = [low, high, *(s for s in _critical_points(a, b, c) if low < s < high)]
    values = [s * (a + s * s * (b + s * s * c)) for s in points]
    return min(values), max(values)


def _critical_points(a: float, b: float, c: float) -> list[float]:
    """Real zeros of p'(s) = a + 3 b s² + 5 c s⁴."""
    discriminant = 9 * b * b - 20 * a * c
    if discriminant < 0:
        return []
    # The quadratic formula in s² without cancellation, so that a tiny c is as exact as c = 0.
    q = -(3 * b + math.copysign(math.sqrt(discriminant), b)) / 2
    squares = [numerator / denominator for numerator, denominator in ((q, 5 * c), (a, q)) if denominator]
    return [sign * math.sqrt(square) for square in squares if square > 0 for sign in (-1, 1)]
