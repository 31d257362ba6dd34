"""Muon for hidden matrices and AdamW for everything else, in one torch optimizer."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT, StateDict

from muon.adamw import adamw_step, number, step_device
from muon.distributed import Engine
from muon.dtensors import gradient, zeros_like_rows
from muon.matrices import SMALLEST_EPS, MatrixMode, Split, Tensors, apply, buckets, pack
from muon.metrics import adamw_metrics, muon_metrics, read
from muon.newton_schulz import (
    DEFAULT_WORKSPACE,
    Iteration,
    iterate,
    memory,
    operations,
    pick_dtype,
    pick_iteration,
    uses_triton,
)
from muon.options import AdjustLR, WeightDecayMode, check_options, check_parameters, lr_factor
from muon.polynomials import KELLER_JORDAN, Coefficients, schedule
from muon.rounding import remainder_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from muon.plan import Plan

# Of each group and device: gradients that are present by turns don't record a graph at every step.
MOST_PLANS = 3

# Of each matrix, in at least float32, that muon.matrices.pack and apply hold at their height, X included.
PACK_COPIES = 6


class Muon(Optimizer):
    """Muon: momentum, orthogonalised matrix by matrix; AdamW for the groups that ask for it.

    For each matrix W with gradient G, learning rate γ, weight decay λ and momentum μ:

        B ← μ B + (1 - μ) G
        M = μ B + (1 - μ) G  (Nesterov), else B
        W ← (1 - γ λ) W - γ f(rows, cols) U p(S) Vᵀ,  where M / ‖M‖ = U S Vᵀ

    The first nine arguments are those of ``torch.optim.Muon``, and so is the result, to within the rounding of the
    orthogonalisation. Matrices of equal sides go through it together. It runs in float64 for float64 parameters, in
    float16 or bfloat16 on a GPU, and on a CPU in bfloat16 if the processor multiplies that natively, else in float32.

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
        weight_decay_mode: ``"decoupled"`` decays every element; ``"cautious"`` those only that the update doesn't move
            away from 0: W ← W - γ (U + λ 1[U W >= 0] W), of Muon and AdamW groups alike.
        neuron_norm: β₂ of NorMuon, for example 0.95: each row of the orthogonalised update is divided by the root of
            the running mean of its mean squares, and the whole scaled to keep its Frobenius norm. Muon groups only.
            State: ``neuron_second_moment``, float32, shaped like the parameter but of size 1 along its rows, so that it
            broadcasts with it and is sharded with its rows.
        momentum_dtype: dtype of ``momentum_buffer``, also of one that a checkpoint brings. ``None``: the gradient's, or
            the checkpoint's. float16 overflows at gradients above 65504 and loses those below 6e-8.
        bf16_remainder: keep 16 more bits of each bfloat16 parameter (state ``remainder``, int16, shaped like it), which
            make it an exact float32 of which the parameter is the nearest bfloat16: small updates add up instead of
            being rounded away. Combined with ``momentum_dtype=torch.float32`` training is what it would be with
            float32 parameters whose forward and backward use bfloat16 copies, in two bytes an element less; in
            AdamW groups the moments are float32 then.
        workspace: bytes that the step of a Muon group may hold beside parameters, gradients and state: matrices that
            need more go through it one part after the other, with the same result. At least one matrix always goes.
            ``None``: 2 GiB.
        maximize: ascend instead of descend.
        foreach: ``False``: one parameter at a time, nothing planned or recorded. ``None`` and ``True``: matrices of
            equal sides together. In AdamW groups as in ``torch.optim.AdamW``; there ``None`` means fused.
        capturable: the step may be captured in a CUDA graph, after one outside of it. Learning rates that are tensors
            on the GPU are read when the graph is replayed; the rest, addresses of gradients included, is fixed.
        distributed_group: ranks that have the same plain parameters and gradients at every step, as those of
            DistributedDataParallel do (``torch.distributed.group.WORLD``): matrices are dealt out among them, each is
            orthogonalised once, and all get the result. All of them must call ``step``. ``None``: each rank does all of
            its own, because a parameter doesn't say whether it is the same elsewhere. Parameters that are DTensors
            (``fully_shard``, tensor parallelism) need no such word: their mesh says it all. Not an option of groups; a
            copied or unpickled optimizer has none.

    Raises:
        ValueError: an option out of range, or a 0-D or 1-D parameter in a Muon group.
        TypeError: a ``distributed_group`` that is no process group of this rank's.
        RuntimeError: at ``step``, for complex parameters or sparse gradients in a Muon group, or in a CUDA graph's
            capture without ``capturable``.

    Example:
        >>> import torch
        >>> from muon import Muon, param_groups
        >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 10))
        >>> optimizer = Muon(param_groups(model, muon={"lr": 0.02}, adamw={"lr": 1e-3}))
        >>> model(torch.tensor([1, 2, 3])).sum().backward()
        >>> optimizer.step()

    Sources: Keller Jordan et al., https://kellerjordan.github.io/posts/muon/; Liu et al., "Muon is Scalable for LLM
    Training", https://arxiv.org/abs/2502.16982; ``torch.optim.Muon``; Li et al., "NorMuon",
    https://arxiv.org/abs/2510.05491; Chen et al., "Cautious Weight Decay", https://arxiv.org/abs/2510.12402.
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
        weight_decay_mode: WeightDecayMode = "decoupled",
        neuron_norm: float | None = None,
        momentum_dtype: torch.dtype | None = None,
        bf16_remainder: bool = False,
        workspace: int | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        distributed_group: "ProcessGroup | None" = None,
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
            "weight_decay_mode": weight_decay_mode,
            "neuron_norm": neuron_norm,
            "momentum_dtype": momentum_dtype,
            "bf16_remainder": bf16_remainder,
            "workspace": workspace,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
        }
        # Not a default: torch's schedulers would take it for the momentum to cycle.
        self._betas = betas
        if not isinstance(distributed_group, (type(None), getattr(dist, "ProcessGroup", type(None)))):
            raise TypeError(
                "distributed_group must be a torch.distributed.ProcessGroup that this rank is in, or None, "
                f"got {distributed_group!r}"
            )
        self._engine = Engine(distributed_group)
        check_options({**defaults, "betas": betas})
        self._plans: dict[tuple[int, torch.device], dict[object, Plan]] = {}
        self._captured: list[Plan] = []  # whose tables callers' graphs read
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as ``torch.optim.Optimizer.add_param_group`` does.

        Args:
            param_group: ``"params"`` and any options of ``Muon``; those left out are the optimizer's own.
                ``"use_muon"``, True or False, may say what ``"algorithm"`` says.

        Raises:
            ValueError, TypeError: as for ``Muon``, and for ``"eps"`` in an AdamW group; the group isn't added then.
        """
        param_group = {"betas": self._betas, **param_group}
        if "use_muon" in param_group:
            param_group["algorithm"] = "muon" if param_group.pop("use_muon") else "adamw"
        if "distributed_group" in param_group:
            raise ValueError("distributed_group is an option of the optimizer, not of a group of parameters")
        if param_group.get("algorithm") == "adamw" and "eps" in param_group:
            raise ValueError("an 'adamw' group has its ε as adamw_eps; eps is the orthogonalisation's")
        super().add_param_group(param_group)
        try:
            check_options(self.param_groups[-1])
            check_parameters(self.param_groups[-1])
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
        self.__dict__.setdefault("_captured", [])
        self.__dict__.setdefault("_engine", Engine())
        self.__dict__.setdefault("_betas", (0.9, 0.999))
        for index, group in enumerate(self.param_groups):
            old = before[index] if index < len(before) else {}
            for name, value in {"betas": self._betas, **self.defaults}.items():
                if name != "differentiable":  # torch has just put it among the defaults
                    group.setdefault(name, old.get(name, value))

    def state_dict(self) -> StateDict:
        """The state, as of any optimizer of torch's, but for an ``adjust_lr_fn`` that is a function.

        As with ``LambdaLR``, whoever loads the state keeps their own function, and ``weights_only=True`` can read it.

        Returns:
            ``"state"``, of each parameter ``momentum_buffer`` (shaped like it, in the gradient's dtype or
                ``momentum_dtype``) and what NorMuon and ``bf16_remainder`` add, or AdamW's ``exp_avg``, ``exp_avg_sq``
                and ``step``; and ``"param_groups"``, the options of each group. ``torch.optim.Muon`` can load it.
        """
        state_dict = super().state_dict()
        for group in state_dict["param_groups"]:
            if callable(group.get("adjust_lr_fn")):
                del group["adjust_lr_fn"]
        return state_dict

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state of this optimizer or of ``torch.optim.Muon``; state keeps the dtype it was saved in.

        Args:
            state_dict: what ``state_dict`` of either returned. Options that it lacks stay as the groups have them.

        Raises:
            ValueError: from torch, for other numbers of groups or parameters.
        """
        final: list[StateDict] = []  # as hooks leave it, of which this one runs last
        hooks = (
            self.register_load_state_dict_pre_hook(lambda _, loaded: final.append(loaded)),
            self.register_load_state_dict_post_hook(lambda _: self._restore_dtypes(final[0]), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _restore_dtypes(self, loaded: StateDict) -> None:
        """torch has cast state to its parameter's dtype, and left AdamW's step on the device that it came from."""
        params = ((p, group) for group in self.param_groups for p in group["params"])
        saved_ids = (i for group in loaded["param_groups"] for i in group["params"])
        for (p, group), saved_id in zip(params, saved_ids, strict=True):
            for name, saved in loaded["state"].get(saved_id, {}).items():
                if name == "step":  # a number in old checkpoints
                    step = torch.tensor(float(saved), dtype=torch.float32, device=step_device(p, group))
                    self.state[p][name] = step
                elif isinstance(saved, Tensor) and self.state[p][name].dtype != saved.dtype:
                    self.state[p][name] = saved.to(p.device, copy=True)

    # What takes time here are kernels of its own; there is nothing for a compiler to fuse.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, which is left as it is.

        Args:
            closure: called first, with gradients enabled, as by any torch optimizer.

        Returns:
            What the closure returned; ``None`` without one.

        Raises:
            RuntimeError: complex parameters or sparse gradients in a Muon group, sparse ones in an AdamW group; in a
                CUDA graph's capture without ``capturable``, or before a step outside of it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        present = self._present()
        for index, group in enumerate(self.param_groups):
            params = present[index]
            if not params:
                continue
            if params[0].is_cuda and torch.cuda.is_current_stream_capturing() and not group["capturable"]:
                raise RuntimeError(
                    "Attempting CUDA graph capture of step() for an instance of Muon "
                    "but param_groups' capturable is False."
                )
            if group["algorithm"] == "muon":
                self._muon_step(index, group, params)
            else:
                adamw_step(group, params, [self.state[p] for p in params])
        return loss

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """What the last step did, group by group, for a logger.

        Nothing is recorded during a step: this computes it anew from gradients and state, at the price of about one
        step in plain torch, and waits for the GPU once. Sharded parameters are gathered, one at a time, so every rank
        must call it, and gets the figures of the whole model. Call it between ``step`` and ``zero_grad``. Parameters
        without a gradient are left out. Keys are ``"0/gradient_norm"`` and so on, by the group's number, or its
        ``"name"`` if no other group has that:

        - ``gradient_norm`` and ``momentum_norm``: Frobenius norms over the group (AdamW: of the first moment);
        - ``update_rms``: root mean square of what was added to the parameters, without weight decay;
        - ``orthogonality_error`` (Muon): ‖O Oᵀ - I‖ / ‖I‖ over all matrices, O the orthogonalised update, on the
          shorter side; with plain Newton-Schulz coefficients it is about 0.3, of an update of low rank about 1.

        How many attention heads a ``QKClip`` scaled down is in its own ``metrics()``, to be merged with these.

        Returns:
            A number for each key.

        Example:
            >>> import torch
            >>> from muon import Muon
            >>> weight = torch.nn.Parameter(torch.eye(4))
            >>> optimizer = Muon([weight], lr=0.1)
            >>> weight.grad = torch.eye(4)
            >>> optimizer.step()
            >>> sorted(optimizer.metrics())
            ['0/gradient_norm', '0/momentum_norm', '0/orthogonality_error', '0/update_rms']
        """
        found: dict[str, Tensor] = {}
        present = self._present()
        names = [group.get("name") for group in self.param_groups]
        for index, group in enumerate(self.param_groups):
            state = "momentum_buffer" if group["algorithm"] == "muon" else "exp_avg"  # which a step has left
            params = [p for p in present[index] if state in self.state.get(p, {})]
            if not params:
                continue
            if group["algorithm"] == "muon":
                factor = functools.partial(lr_factor, group["adjust_lr_fn"])
                metrics = muon_metrics(group, [self._tensors(p, group) for p in params], factor)
            else:
                metrics = adamw_metrics(group, params, [self.state[p] for p in params])
            label = index if names[index] is None or names.count(names[index]) > 1 else names[index]
            found |= {f"{label}/{name}": value for name, value in metrics.items()}
        return read(found)

    def _present(self) -> list[list[Tensor]]:
        """The parameters to step, group by group: of Muon's, and of those that all ranks of ``distributed_group`` have,
        the ones with a gradient on every rank."""
        asked = [
            p for g in self.param_groups for p in g["params"] if g["algorithm"] == "muon" or self._engine.replicates(p)
        ]
        agreed = self._engine.agreed(asked)
        left_out = {id(p) for p in asked} - agreed
        return [[p for p in g["params"] if p.grad is not None and id(p) not in left_out] for g in self.param_groups]

    def _muon_step(self, index: int, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if torch.is_complex(p):
                raise RuntimeError("Muon does not support complex parameters")
            if p.grad is not None and p.grad.is_sparse:
                raise RuntimeError("Muon does not support sparse gradients")
        tensors = [self._tensors(p, group) for p in params]
        scalars = {"lr": number(group["lr"]), "weight_decay": group["weight_decay"], "momentum": group["momentum"]}
        planned = group["foreach"] is not False and _is_row_major(group)
        tensors, shared = self._engine.divide(tensors, group["matrix"])
        for layout, part in shared.items():
            options = _planned(_options(group)) | {"planned": planned, "groups": len(self.param_groups)}
            self._engine.step(part, layout, **scalars, **options, dtype_of=_dtype_of_step)
        for device, part in _by_device(tensors, planned).items():
            if device is None:
                muon(part, **scalars, **_options(group))
            else:
                plan = self._plan(index, group, device, part)
                plan.step(part, **scalars, capturable=group["capturable"], pool=self._pool(device))

    def _tensors(self, p: Tensor, group: dict[str, Any]) -> Tensors:
        """The parameter with its gradient and its state, which is made where it is missing."""
        state, grad = self.state[p], gradient(p)
        dtype = group["momentum_dtype"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad, dtype=dtype, memory_format=torch.preserve_format)
        elif dtype and state["momentum_buffer"].dtype != dtype:
            state["momentum_buffer"] = state["momentum_buffer"].to(dtype)
        if group["neuron_norm"] is not None and "neuron_second_moment" not in state:
            state["neuron_second_moment"] = zeros_like_rows(p, group["matrix"])
        second_moment = None if group["neuron_norm"] is None else state["neuron_second_moment"]
        return Tensors(p, grad, state["momentum_buffer"], second_moment, remainder_of(p, state, group))

    def _plan(self, index: int, group: dict[str, Any], device: torch.device, tensors: list[Tensors]) -> "Plan":
        """One of the group's latest plans if one fits today's gradients and options, or else a new one."""
        from muon.plan import STEP_FIRST, Plan

        options = _options(group)
        described = tuple(tuple(t if t is None else (t.shape, t.dtype) for t in whole) for whole in tensors)
        key = (described, repr(options), id(options["adjust_lr_fn"]))  # the plan keeps the function, and so its id
        plans = self._plans.setdefault((index, device), {})
        plan = plans.pop(key, None)
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if plan is None and capturing:
            raise RuntimeError(STEP_FIRST)
        if plan is None:
            options = _planned(options)
            if options["matrix"] == "transposed":  # the iteration doesn't care which side is which, the factor does
                options |= {"matrix": "batch", "lr_factor": functools.partial(_transposed, options["lr_factor"])}
            plan = Plan(tensors, **options)
        plans[key] = plan  # the latest comes last
        if len(plans) > MOST_PLANS:
            del plans[next(iter(plans))]
        if capturing and plan not in self._captured:
            self._captured.append(plan)
        return plan

    def _pool(self, device: torch.device) -> Any:
        """Memory of a graph recorded before on this device: none runs while another does, so all may use the same."""
        plans = (plan for (_, other), plans in self._plans.items() if other == device for plan in plans.values())
        return next((plan.graph.pool() for plan in plans if plan.graph is not None), None)


def _is_row_major(group: dict[str, Any]) -> bool:
    """Whether kernels can have the group: blocks of columns, and neurons that are columns, aren't theirs."""
    return group["matrix"] != "transposed" or (group["split"] is None and group["neuron_norm"] is None)


def _transposed(factor: Callable[[int, int], float], rows: int, cols: int) -> float:
    return factor(cols, rows)


def _by_device(tensors: Iterable[Tensors], planned: bool) -> dict[torch.device | None, list[Tensors]]:
    """What goes to a plan, by its device, and, under None, what plain torch does."""
    found: dict[torch.device | None, list[Tensors]] = {}
    for whole in tensors:
        device = None
        if planned and uses_triton("auto", whole.param):
            from muon.plan import suits

            device = whole.param.device if suits(whole) else None
        found.setdefault(device, []).append(whole)
    return found


def _options(group: dict[str, Any]) -> dict[str, Any]:
    names = (
        "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "matrix", "split", "weight_decay_mode",
        "neuron_norm", "workspace", "maximize", "foreach",
    )  # fmt: skip
    return {name: group[name] for name in names}


def _planned(options: dict[str, Any]) -> dict[str, Any]:
    """The options as plans take them: what to compute in place of what it is called."""
    options = {name: value for name, value in options.items() if name != "foreach"}
    options["steps"] = schedule(options.pop("ns_coefficients"), options.pop("ns_steps"))
    options["lr_factor"] = functools.partial(lr_factor, options.pop("adjust_lr_fn"))
    options["cautious"] = options.pop("weight_decay_mode") == "cautious"
    return options


def muon(
    tensors: Sequence[Tensors],
    *,
    lr: float | Tensor,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: Coefficients,
    eps: float,
    ns_steps: int,
    adjust_lr_fn: AdjustLR,
    matrix: MatrixMode,
    split: Split,
    weight_decay_mode: WeightDecayMode,
    neuron_norm: float | None,
    workspace: int | None,
    maximize: bool,
    foreach: bool | None,
) -> None:
    """One Muon step of parameters and states, in place; see ``Muon``."""
    steps = schedule(ns_coefficients, ns_steps)

    def most(n: int, m: int, param: Tensor) -> int:
        iteration = pick_iteration("auto", steps, n, m, None, uses_triton("auto", param))
        in_pack = PACK_COPIES * n * m * torch.promote_types(param.dtype, torch.float32).itemsize
        needed = max(in_pack, memory(iteration, n, m, _dtype_of_step(iteration, param)))
        return (workspace or DEFAULT_WORKSPACE) // needed

    for bucket in buckets(tensors, matrix, split, most, together=foreach is not False):
        (n, m), param = bucket.sides, bucket.param
        use_triton = uses_triton("auto", param)
        iteration = pick_iteration("auto", steps, n, m, None, use_triton)
        ops = operations(use_triton)
        X = ops.allocate(bucket.batch, n, m, param, _dtype_of_step(iteration, param))
        pack(bucket, X, momentum, nesterov=nesterov, maximize=maximize, eps=max(eps, SMALLEST_EPS))
        X = iterate(X, steps, iteration, ops)
        rate = lr.to(param.device) if isinstance(lr, Tensor) else lr
        shapes = {block.is_tall: (block.rows, block.cols) for block in bucket.blocks}
        scales = {is_tall: -rate * lr_factor(adjust_lr_fn, *shape) for is_tall, shape in shapes.items()}
        cautious = weight_decay_mode == "cautious"
        apply(bucket, X, 1 - rate * weight_decay, scales, cautious=cautious, neuron_norm=neuron_norm)


def _dtype_of_step(iteration: Iteration, param: Tensor) -> torch.dtype:
    """That of ``orthogonalize``, but bfloat16, as on a GPU and in torch.optim.Muon, where a CPU multiplies it natively.

    There it takes half of float32's time; without the instructions it would take 8 to 38 times as long.
    """
    if param.device.type == "cpu" and param.dtype in (torch.float32, torch.bfloat16) and multiplies_bfloat16():
        return torch.bfloat16
    return pick_dtype(iteration, param.dtype, param.device)


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether the processor has instructions for it: AVX512-BF16 or AMX."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, check, bool)() for check in checks)
