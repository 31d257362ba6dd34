"""Muon for hidden matrices and AdamW for everything else, in one torch optimizer."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT, StateDict

from muon.matrices import MatrixMode, Split, apply, buckets, pack, row_blocks
from muon.newton_schulz import iterate, operations, pick_dtype, pick_iteration, uses_triton
from muon.polynomials import KELLER_JORDAN, Coefficients, schedule

if TYPE_CHECKING:
    from muon.plan import Plan

AdjustLR: TypeAlias = (
    Literal["original", "match_rms_adamw", "spectral_unclamped"] | Callable[[tuple[int, int]], float] | None
)


class Muon(Optimizer):
    r"""Muon: momentum, orthogonalised matrix by matrix; AdamW for the groups that ask for it.

    For each matrix W with gradient G, learning rate γ, weight decay λ and momentum μ:

    .. math::
        B &\leftarrow \mu B + (1 - \mu) G \\
        M &= \mu B + (1 - \mu) G \text{ (Nesterov), else } B \\
        W &\leftarrow (1 - \gamma \lambda) W - \gamma\, f(\text{rows}, \text{cols})\, U p(S) V^\top
        \quad \text{where } M / \lVert M \rVert = U S V^\top

    The first nine arguments are those of ``torch.optim.Muon``, and so is the result, to within the rounding of the
    orthogonalisation. Matrices of equal sides go through it together.

    A 2-D parameter is one matrix; a 3-D parameter is a batch of matrices (experts); a 4-D or 5-D parameter is a
    convolution, seen as (out, everything else).

    Args:
        params: parameters, named parameters, or groups of them. Every option below can be set in a group. A group with
            ``algorithm="adamw"`` (or ``use_muon=False``) takes parameters of any shape.
        lr: learning rate γ, of Muon and AdamW groups alike unless a group sets its own.
        weight_decay: decoupled weight decay λ.
        momentum: μ.
        nesterov: look ahead by one gradient.
        ns_coefficients: Newton-Schulz coefficients: a triple for every step, a preset's name (``muon.PRESETS``), or a
            sequence of triples, one a step.
        eps: smallest norm the orthogonalisation divides by, after scaling the matrix to largest magnitude 1.
        ns_steps: number of Newton-Schulz steps.
        adjust_lr_fn: factor f. ``"original"`` (and ``None``): sqrt(max(1, rows / cols)); ``"match_rms_adamw"``:
            0.2 sqrt(max(rows, cols)), which lets AdamW's learning rate and weight decay be reused;
            ``"spectral_unclamped"``: sqrt(rows / cols); or a callable of (rows, cols).
        betas: AdamW's decay rates of the first and second moment.
        adamw_eps: AdamW's ε.
        matrix: ``"batch"``: the last two dimensions are matrices; ``"flatten"``: (first dimension, everything else);
            ``"transposed"``: the last two dimensions are matrices stored (in, out), as in GPT-2's ``Conv1D``: f and
            ``split`` take columns for rows.
        split: orthogonalise blocks of rows as matrices of their own (fused qkv, gate and up, heads): a number of equal
            blocks, or their sizes.
        maximize: ascend instead of descend.

    Raises:
        ValueError: an option out of range, or a 0-D or 1-D parameter in a Muon group.
        RuntimeError: at ``step``, for complex parameters or sparse gradients in a Muon group.

    Example:
        >>> import torch
        >>> from muon import Muon, param_groups
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 10))
        >>> optimizer = Muon(param_groups(model, muon={"lr": 0.02}, adamw={"lr": 1e-3}))
        >>> model(torch.tensor([1, 2, 3])).sum().backward()
        >>> optimizer.step()

    Sources: Keller Jordan et al., https://kellerjordan.github.io/posts/muon/; Liu et al., "Muon is Scalable for LLM
    Training", https://arxiv.org/abs/2502.16982; ``torch.optim.Muon``.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = KELLER_JORDAN,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLR = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        matrix: MatrixMode = None,
        split: Split = None,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "algorithm": "muon",
            "adamw_eps": adamw_eps,
            "matrix": matrix,
            "split": split,
            "maximize": maximize,
        }
        # Not a default: torch's schedulers would take it for the momentum to cycle.
        self._betas = betas
        _check_options({**defaults, "betas": betas})
        self._plans: dict[int, tuple[object, Plan]] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; see ``torch.optim.Optimizer.add_param_group``. ``use_muon`` is understood."""
        param_group = {"betas": self._betas, **param_group}
        if "use_muon" in param_group:
            param_group["algorithm"] = "muon" if param_group.pop("use_muon") else "adamw"
        if param_group.get("algorithm") == "adamw" and "eps" in param_group:
            raise ValueError("an 'adamw' group has its ε as adamw_eps; eps is the orthogonalisation's")
        super().add_param_group(param_group)
        try:
            _check_options(self.param_groups[-1])
            _check_parameters(self.param_groups[-1])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_betas": self._betas}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A checkpoint of torch.optim.Muon lacks the options that are ours alone: those of today's groups stay.
        before = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        self._plans = {}
        self.__dict__.setdefault("_betas", (0.9, 0.999))
        for index, group in enumerate(self.param_groups):
            old = before[index] if index < len(before) else {}
            for name, value in {"betas": self._betas, **self.defaults}.items():
                if name != "differentiable":  # torch has just put it among the defaults
                    group.setdefault(name, old.get(name, value))

    def state_dict(self) -> StateDict:
        """The state, as of any optimizer of torch's, but for an ``adjust_lr_fn`` that is a function.

        As with ``LambdaLR``, whoever loads the state keeps their own function, and ``weights_only=True`` can read it.
        """
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            if callable(group.get("adjust_lr_fn")):
                del group["adjust_lr_fn"]
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state of this optimizer or of ``torch.optim.Muon``; momentum keeps the dtype it was saved in."""
        saved: list[StateDict] = []  # as the hooks that were registered before leave it
        hooks = (
            self.register_load_state_dict_pre_hook(lambda _, state: saved.append(state)),
            self.register_load_state_dict_post_hook(lambda _: self._restore_dtypes(saved[0]), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _restore_dtypes(self, state_dict: StateDict) -> None:
        params = (p for group in self.param_groups for p in group["params"])
        saved_ids = (i for group in state_dict["param_groups"] for i in group["params"])
        for p, saved_id in zip(params, saved_ids, strict=False):
            state = self.state.get(p, {})
            if "step" in state:  # torch leaves AdamW's step on the device it was saved from, and a number one
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=p.device)
            saved = state_dict["state"].get(saved_id, {}).get("momentum_buffer")
            if saved is not None and state["momentum_buffer"].dtype != saved.dtype:  # torch has just cast it
                state["momentum_buffer"] = saved.to(p.device, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's value, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            if not params:
                continue
            if group["algorithm"] == "muon":
                self._muon_step(group, params, grads)
            else:
                self._adamw_step(group, params, grads)
        return loss

    def _muon_step(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        if params[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("Muon can't be captured in a CUDA graph yet: on a GPU its step records one of its own")
        for p, grad in zip(params, grads, strict=True):
            if torch.is_complex(p):
                raise RuntimeError("Muon does not support complex parameters")
            if grad.is_sparse:
                raise RuntimeError("Muon does not support sparse gradients")
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(grad, memory_format=torch.preserve_format)
        momentums = [self.state[p]["momentum_buffer"] for p in params]
        scalars = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"], "momentum": group["momentum"]}
        plan = self._plan(group, params, grads, momentums)
        if plan is not None:
            plan.step(params, grads, momentums, **scalars)
        else:
            muon(params, grads, momentums, **scalars, **_options(group))

    def _plan(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], momentums: list[Tensor]
    ) -> "Plan | None":
        """The group's plan, made anew when parameters, gradients' presence or options have changed; None on a CPU."""
        device = params[0].device
        if not uses_triton("auto", params[0]) or any(p.device != device for p in params):
            return None
        from muon.plan import Plan, suits

        blocks_of_columns = group["matrix"] == "transposed" and group["split"] is not None
        if blocks_of_columns or not suits(*params, *grads, *momentums):
            return None
        options = _options(group)
        tensors = zip(params, grads, momentums, strict=True)
        key = (tuple((p.shape, p.dtype, g.dtype, m.dtype) for p, g, m in tensors), device, repr(options))
        slot = next(i for i, other in enumerate(self.param_groups) if other is group)
        if slot not in self._plans or self._plans[slot][0] != key:
            steps = schedule(options.pop("ns_coefficients"), options.pop("ns_steps"))
            factor = functools.partial(lr_factor, options.pop("adjust_lr_fn"))
            if options["matrix"] == "transposed":  # the iteration doesn't care which side is which, the factor does
                options["matrix"], factor = "batch", functools.partial(_transposed, factor)
            self._plans[slot] = key, Plan(params, grads, momentums, steps, factor, **options)
        return self._plans[slot][1]

    def _adamw_step(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in params)
        for p, grad in zip(params, grads, strict=True):
            if grad.is_sparse:
                raise RuntimeError("AdamW does not support sparse gradients")
            state = self.state[p]
            if "exp_avg" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if fused else "cpu")
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        adamw(
            params,
            grads,
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [self.state[p]["step"] for p in params],
            fused=fused,
            has_complex=any(map(torch.is_complex, params)),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["adamw_eps"],
            maximize=group["maximize"],
        )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    names = ("nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "matrix", "split", "maximize")
    return {name: group[name] for name in names}


def muon(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: Coefficients,
    eps: float,
    ns_steps: int,
    adjust_lr_fn: AdjustLR,
    matrix: MatrixMode,
    split: Split,
    maximize: bool,
) -> None:
    """One Muon step of ``params`` and ``momentum_buffers``, in place; see ``Muon``."""
    steps = schedule(ns_coefficients, ns_steps)
    for bucket in buckets(params, grads, momentum_buffers, matrix, split):
        (n, m), param = bucket.sides, bucket.blocks[0].param
        use_triton = uses_triton("auto", param)
        iteration = pick_iteration("auto", steps, n, m, None, use_triton)
        ops = operations(use_triton)
        X = ops.allocate(bucket.batch, n, m, param, pick_dtype(iteration, param.dtype, param.device))
        pack(bucket, X, momentum, nesterov=nesterov, maximize=maximize, eps=eps)
        X = iterate(X, steps, iteration, ops)
        scale_wide, scale_tall = (-lr * lr_factor(adjust_lr_fn, *shape) for shape in ((n, m), (m, n)))
        apply(bucket, X, 1 - lr * weight_decay, scale_wide, scale_tall)


def lr_factor(adjust_lr_fn: AdjustLR, rows: int, cols: int) -> float:
    """Factor of the learning rate of a (rows, cols) matrix."""
    if callable(adjust_lr_fn):
        return adjust_lr_fn((rows, cols))
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    ratio = rows / max(cols, 1)
    return math.sqrt(ratio if adjust_lr_fn == "spectral_unclamped" else max(1.0, ratio))


def _transposed(factor: Callable[[int, int], float], rows: int, cols: int) -> float:
    return factor(cols, rows)


def _check_options(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Learning rate should be >= 0 but is: {lr}")
    for name in ("momentum", "weight_decay", "eps", "adamw_eps"):
        if not group[name] >= 0.0:
            raise ValueError(f"{name.replace('_', ' ')} should be >= 0 but is: {group[name]}")
    if len(group["betas"]) != 2:
        raise ValueError(f"betas should be two numbers but are: {group['betas']}")
    for index, beta in enumerate(group["betas"]):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"betas[{index}] should be in [0, 1) but is: {beta}")
    if group["algorithm"] not in ("muon", "adamw"):
        raise ValueError(f"algorithm should be 'muon' or 'adamw' but is: {group['algorithm']!r}")
    if group["matrix"] not in (None, "batch", "flatten", "transposed"):
        raise ValueError(f"matrix should be None, 'batch', 'flatten' or 'transposed' but is: {group['matrix']!r}")
    adjust_lr_fn = group["adjust_lr_fn"]
    names = (None, "original", "match_rms_adamw", "spectral_unclamped")
    if not callable(adjust_lr_fn) and adjust_lr_fn not in names:
        raise ValueError(f"Adjust learning rate function {adjust_lr_fn} is not supported: use one of {names[1:]}")
    schedule(group["ns_coefficients"], group["ns_steps"])


def _check_parameters(group: dict[str, Any]) -> None:
    if group["algorithm"] != "muon":
        return
    names: Sequence[str] = group.get("param_names") or [f"number {i}" for i in range(len(group["params"]))]
    for name, p in zip(names, group["params"], strict=True):
        if p.ndim < 2:
            raise ValueError(
                f"Muon only supports 2D parameters whereas we found a parameter with size: {p.size()} (parameter "
                f"{name}; 3D to 5D are supported too). Put it into a group with algorithm='adamw'."
            )
        row_blocks(p, group["matrix"], group["split"])
