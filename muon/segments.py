"""A Muon step between whose parts collectives run: each part is recorded as a CUDA graph, collectives are not.

Like ``muon.plan`` it is planned once; what changes from step to step lies in two small tables in device memory. Only
waits order the streams, the host never stops. All graphs share the memory of one pool, as no two ever run at the same
time; what one leaves for a collective or for another lies in a buffer that the caller owns.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from muon.layout import Matrix
from muon.matrices import SMALLEST_EPS, Tensors
from muon.plan import Tables, are_aligned, is_as_stored, record


class Segments(Tables):
    """The step of these matrices of the parameters, a row of the tables each.

    A subclass says which segments there are (``_segments``) and runs them and its collectives (``_run``).
    """

    def __init__(
        self,
        tensors: Sequence[Tensors],
        matrices: Sequence[Matrix],
        places: Sequence[Sequence[int]],
        *,
        nesterov: bool,
        maximize: bool,
        eps: float,
        cautious: bool,
    ) -> None:
        self.nesterov, self.maximize, self.eps = nesterov, maximize, max(eps, SMALLEST_EPS)
        self.cautious = cautious
        self.matrices = matrices
        self.shapes = sorted({(matrix.rows, matrix.cols) for matrix in matrices})
        self.shape_factors: list[float] = []
        owners = [matrix.index for matrix in matrices]
        super().__init__(owners, places, [0.0] * len(owners), tensors[0].param.device)
        self.forget()

    @property
    def buffer_bytes(self) -> int:
        """That the step needs of the caller's buffer."""
        raise NotImplementedError

    def _segments(self, buffer: Tensor) -> list[Callable[[], None] | None]:
        """What runs between collectives; None is what launches nothing."""
        raise NotImplementedError

    def _run(self) -> None:
        """All of ``self.segments``, and the collectives."""
        raise NotImplementedError

    def forget(self) -> None:
        """What was recorded, and with which buffer."""
        self.aligned: bool | None = None
        self.buffer: Tensor | None = None
        self.segments: list[Callable[[], None]] = []
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def step(
        self,
        tensors: Sequence[Tensors],
        buffer: Tensor,
        lr_factor: Callable[[int, int], float],
        *,
        lr: float | Tensor,
        weight_decay: float,
        momentum: float,
        pool: Any = None,
    ) -> None:
        """Update parameters and states in place; every rank of the layout takes part.

        ``buffer`` (bytes, uint8) is where what is sent and received lies, ``pool`` the memory of another plan's graphs.
        """
        are_stored = all(t is None or is_as_stored(t) for whole in tensors for t in whole)
        reached = tensors if are_stored else [whole.map(_as_stored) for whole in tensors]
        table = self._addresses(reached)
        aligned = are_aligned(table)
        with torch.cuda.device_of(self.table):
            self._copy(table, self.table)
            self._follow(lr_factor)
            self._set_scalars(lr, weight_decay, momentum, on_device=isinstance(lr, Tensor))
            if aligned != self.aligned or buffer is not self.buffer:  # this step compiles the kernels
                self.forget()
                self.aligned, self.buffer = aligned, buffer
                self.segments = [segment or _nothing for segment in self._segments(buffer)]
            elif self.table.is_cuda and not self.graphs:
                self._record(pool)
            self._run()
        if not are_stored:
            for whole, copy in zip(tensors, reached, strict=True):
                _copy_back(whole, copy)

    def _follow(self, lr_factor: Callable[[int, int], float]) -> None:
        factors = [lr_factor(*shape) for shape in self.shapes]
        if factors != self.shape_factors:
            of_shape = dict(zip(self.shapes, factors, strict=True))
            self._set_factors([of_shape[matrix.rows, matrix.cols] for matrix in self.matrices])
            self.shape_factors = factors

    def _record(self, pool: Any) -> None:
        """Put graphs in the place of segments."""
        for i, segment in enumerate(self.segments):
            if segment is not _nothing:  # an empty graph would come with a warning
                self.graphs.append(record(segment, self.device, self.graphs[0].pool() if self.graphs else pool))
                self.segments[i] = self.graphs[-1].replay

    def _rows(self, rows: range) -> tuple[Tensor, Tensor]:
        return self.table[rows.start : rows.stop], self.scalars[rows.start : rows.stop]


def place_of(matrix: Matrix, whole: Tensors) -> list[int]:
    """The bytes from each (local) tensor's start to where the matrix begins."""
    starts = []
    for tensor in whole:
        part = None if tensor is None else matrix.part(tensor.new_empty(tensor.shape, device="meta"))
        starts.append(0 if part is None else int(part.storage_offset()) * part.element_size())
    return starts


def round_up(size: int) -> int:
    """To what memory is allocated in."""
    return -(-size // 512) * 512


def _nothing() -> None:
    pass


def _as_stored(tensor: Tensor) -> Tensor:
    """What is laid out otherwise, perhaps on this rank alone, changes nothing about what is sent."""
    return tensor if is_as_stored(tensor) else tensor.resolve_neg().contiguous()


def _copy_back(whole: Tensors, copy: Tensors) -> None:
    for name, tensor, used in zip(Tensors._fields, whole, copy, strict=True):
        if tensor is not None and used is not None and used is not tensor and name != "grad":
            tensor.copy_(used)
