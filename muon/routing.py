"""Which parameters of a model are Muon's and which AdamW's."""

import inspect
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn

from muon.optimizer import Muon

Override = str | dict[str, Any]

OPTIONS = {"algorithm", *inspect.signature(Muon).parameters} - {"params"}

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)

# What GPT-2, Llama, BERT, ViT and ResNet implementations call these modules.
HEAD_NAMES = {"head", "heads", "output", "classifier", "score", "fc"}  # at the top of a model
VOCABULARY_HEAD_NAMES = {"lm_head", "unembed", "embed_out"}  # anywhere
WRAPPERS = {"module", "_orig_mod"}  # DistributedDataParallel, torch.compile
ROUTER_NAMES = {"gate", "router"}
EMBEDDING_PARTS = ("embed", "token", "wte", "wpe", "position")


class Route(NamedTuple):
    """Where one parameter goes and why."""

    name: str
    param: Tensor
    options: dict[str, Any]
    why: str


class ParamGroups(list[dict[str, Any]]):
    """A list of parameter groups for ``Muon``; printed, it is a table of what went where and why."""

    def __init__(self, routes: list[Route]) -> None:
        self.routes = routes
        groups: dict[str, dict[str, Any]] = {}
        for route in routes:
            group = groups.setdefault(repr(sorted(route.options.items())), {"params": [], **route.options})
            group["params"].append((route.name, route.param))
        super().__init__(sorted(groups.values(), key=lambda group: group["algorithm"] != "muon"))

    def __str__(self) -> str:
        header = ("parameter", "shape", "algorithm", "why")
        rows: list[tuple[str, ...]] = [
            (route.name, " × ".join(map(str, route.param.shape)) or "scalar", route.options["algorithm"], route.why)
            for route in self.routes
        ]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        rows = [header, tuple("-" * width for width in widths), *rows]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, self._summary()])

    def _summary(self) -> str:
        counts = {"muon": 0, "adamw": 0}
        for route in self.routes:
            counts[route.options["algorithm"]] += route.param.numel()
        return f"{counts['muon']:,} elements to Muon, {counts['adamw']:,} to AdamW"


def param_groups(
    model: nn.Module,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Override] | None = None,
) -> ParamGroups:
    """Parameter groups for ``Muon``: hidden matrices, convolutions and experts to Muon, the rest to AdamW.

    Embeddings, the output head (tied or not), norms, biases, scalars and the gates that route to experts go to AdamW.
    Every trainable parameter comes exactly once, shared ones under their first name.

    Args:
        model: the model; frozen parameters are left out.
        muon: options of the Muon groups, such as ``{"lr": 0.02}``.
        adamw: options of the AdamW groups, such as ``{"lr": 3e-4, "weight_decay": 0.0}``.
        overrides: by name: a shell-style pattern to ``"muon"``, ``"adamw"``, or a dict of options, which may have
            ``"algorithm"``. Where several patterns match, the last one counts.

    Returns:
        The groups, a list; ``print`` shows a table of every parameter with its shape, algorithm and why.

    Raises:
        ValueError: a pattern that matches no parameter, or an option or algorithm that isn't one.

    Example:
        >>> import torch
        >>> from muon import param_groups
        >>> model = torch.nn.Sequential(torch.nn.Embedding(65, 32), torch.nn.Linear(32, 128), torch.nn.LayerNorm(128))
        >>> print(param_groups(model))
        parameter  shape     algorithm  why
        ---------  --------  ---------  -------------
        0.weight   65 × 32   adamw      embedding
        1.weight   128 × 32  muon       hidden matrix
        1.bias     128       adamw      vector
        2.weight   128       adamw      norm
        2.bias     128       adamw      norm
        4,096 elements to Muon, 2,464 to AdamW
    """
    defaults = {"muon": dict(muon or {}), "adamw": dict(adamw or {})}
    for argument, options in defaults.items():
        _check_names(argument, options)
    routes = [_override(route, overrides or {}) for route in _routes(model)]
    for pattern in overrides or {}:
        if not any(fnmatchcase(route.name, pattern) for route in routes):
            raise ValueError(f"overrides: the pattern {pattern!r} matches no trainable parameter")
    return ParamGroups(
        [route._replace(options={**defaults[route.options["algorithm"]], **route.options}) for route in routes]
    )


def _check_names(argument: str, options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in OPTIONS:
            raise ValueError(f"{argument}: there is no option {name!r}; options are {', '.join(sorted(OPTIONS))}")


def _routes(model: nn.Module) -> Iterator[Route]:
    heads = _tied_or_output_weights(model)
    modules = dict(model.named_modules())
    for name, param in model.named_parameters():  # shared parameters come once
        if not param.requires_grad:
            continue
        owner, _, _ = name.rpartition(".")
        module = modules[owner]
        why = _reason_for_adamw(name, owner, module, param, heads)
        if why:
            yield Route(name, param, {"algorithm": "adamw"}, why)
        elif isinstance(module, CONVOLUTIONS):
            yield Route(name, param, {"algorithm": "muon", "matrix": "flatten"}, "convolution")
        else:
            yield Route(name, param, {"algorithm": "muon"}, "hidden matrix" if param.ndim == 2 else "experts")


def _reason_for_adamw(name: str, owner: str, module: nn.Module, param: Tensor, heads: set[int]) -> str:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if isinstance(module, NORMS):
        return "norm"
    if param.ndim < 2:
        return "vector" if param.ndim else "scalar"
    if "bias" in name.rpartition(".")[2]:
        return "bias"
    if id(param) in heads or _is_named_head(owner):
        return "output head"
    if owner.rpartition(".")[2] in ROUTER_NAMES and param.shape[0] < param.shape[-1]:
        return "gate"
    if not isinstance(module, (nn.Linear, *CONVOLUTIONS)) and _looks_like_embedding(name, param):
        return "embedding"
    return ""


def _is_named_head(owner: str) -> bool:
    """``output`` or ``fc`` are heads at the top of a model and hidden layers inside it."""
    parts = [part for part in owner.split(".") if part not in WRAPPERS]
    return bool(parts) and (parts[0] in HEAD_NAMES or parts[-1] in VOCABULARY_HEAD_NAMES)


def _looks_like_embedding(name: str, param: Tensor) -> bool:
    """Position tables, class and register tokens: parameters of the model itself, usually of leading size 1."""
    return param.shape[0] == 1 or any(part in name.rpartition(".")[2].lower() for part in EMBEDDING_PARTS)


def _tied_or_output_weights(model: nn.Module) -> set[int]:
    """Weights shared with an embedding, and of linear layers with as many outputs as a vocabulary has entries."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabularies = {module.num_embeddings for module in embeddings}
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    outputs = [module for module in linears if module.out_features in vocabularies]
    return {id(module.weight) for module in [*embeddings, *outputs]}


def _override(route: Route, overrides: Mapping[str, Override]) -> Route:
    for pattern, override in overrides.items():
        if fnmatchcase(route.name, pattern):
            options = {"algorithm": override} if isinstance(override, str) else dict(override)
            if "use_muon" in options:
                options["algorithm"] = "muon" if options.pop("use_muon") else "adamw"
            _check_names("overrides", options)
            route = route._replace(options={**route.options, **options}, why=f"override {pattern!r}")
            if route.options["algorithm"] not in ("muon", "adamw"):
                raise ValueError(f"overrides: {pattern!r} should go to 'muon' or 'adamw' but is: {override!r}")
    return route
