"""What of ``torch.distributed.tensor`` the package needs, without importing it for those who have no DTensor."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from muon.matrices import MatrixMode, column_dims, shape_of_rows


def is_dtensor(tensor: object) -> bool:
    if type(tensor) in (Tensor, Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")  # an import statement here would cost more than all the rest
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, as a view."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def full(tensor: Tensor) -> Tensor:
    """The whole of it, gathered from all ranks."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def gradient(p: Tensor) -> Tensor:
    """The gradient, placed as its parameter is."""
    grad: Any = p.grad
    if is_dtensor(p) and grad.placements != p.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return grad  # type: ignore[no-any-return]


def distributed_like(whole: Tensor, param: Tensor) -> Tensor:
    """Of a tensor that all ranks have whole the parts that they have of the parameter; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    p: Any = param
    return distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)


def zeros_like_rows(param: Tensor, matrix: MatrixMode) -> Tensor:
    """Zeros, in at least float32, one for each row of each matrix of the parameter, and sharded as its rows are."""
    shape, cols = shape_of_rows(param, matrix), column_dims(param, matrix)
    dtype = torch.promote_types(param.dtype, torch.float32)
    if not is_dtensor(param):
        return torch.zeros(shape, dtype=dtype, device=param.device)
    from torch.distributed.tensor import Replicate, zeros

    p: Any = param
    placements = [
        Replicate() if hasattr(placement, "dim") and placement.dim % p.ndim in cols else placement
        for placement in p.placements
    ]
    return zeros(shape, dtype=dtype, device_mesh=p.device_mesh, placements=placements)
