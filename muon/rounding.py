"""A bfloat16 parameter and a 16-bit remainder that together are a float32, exactly.

The bits of a float32 are those of a bfloat16 followed by 16 more. With the parameter the nearest bfloat16, ties away
from zero, the difference of the two bit patterns as integers lies between -2¹⁵ and 2¹⁵ - 1, and is kept. (Ties to even
would need one value more than 16 bits have.) Nothing is lost from step to step, and nothing is random.

A parameter that someone else has changed meanwhile stays what it is to within half a bfloat16 unit in the last place.
"""

from typing import Any

import torch
from torch import Tensor

HALF = 0x8000  # half a unit in the last place of a bfloat16, in units of a float32
UPPER = -0x10000  # the bits that are a bfloat16's
NAN = 0x7FC00000


def remainder_of(p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor | None:
    """A bfloat16 parameter's remainder, if its group keeps one; made where it is missing."""
    if not group["bf16_remainder"] or p.dtype != torch.bfloat16:
        return None
    if "remainder" not in state:
        state["remainder"] = torch.zeros_like(p, dtype=torch.int16, memory_format=torch.preserve_format)
    remainder: Tensor = state["remainder"]
    return remainder


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 that a bfloat16 ``param`` and its int16 ``remainder`` stand for."""
    return (param.float().view(torch.int32) + remainder).view(torch.float32)


def split_off(exact: Tensor, param: Tensor, remainder: Tensor) -> None:
    """Write a float32 to ``param``, rounded to the nearest, and what that leaves to ``remainder``."""
    bits = exact.view(torch.int32).masked_fill(exact.isnan(), NAN)  # other NaNs would round to a zero
    upper = (bits + HALF).bitwise_and_(UPPER)
    param.copy_(upper.view(torch.float32))
    remainder.copy_(bits - upper)
