"""Which parameters of a model are Muon's and which AdamW's."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from muon.matrices import matrix_shape
from muon.optimizer import Muon

Override = str | dict[str, Any]

OPTIONS = {"algorithm", *inspect.signature(Muon).parameters} - {"params", "distributed_group"}

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *CONVOLUTIONS)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
RECURRENT_GATES = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}

# What GPT-2, Llama, BERT, ViT, ResNet and DETR implementations call these modules.
HEAD_WORDS = {"head", "heads", "output", "outputs", "out", "classifier", "predictor", "score", "logits", "fc", "cls"}
VOCABULARY_HEAD_NAMES = {"lm_head", "unembed", "embed_out"}
ROUTER_NAMES = {"gate", "router"}
EMBEDDING_PARTS = ("embed", "token", "wte", "wpe", "position", "latent", "prompt")
POSITION_PARTS = ("pos", "wpe", "type", "segment")  # embeddings that are not of a vocabulary
FUSED_NAMES = {"qkv", "qkv_proj", "c_attn", "Wqkv", "query_key_value", "gate_up_proj", "in_proj_qkv"}
FACTOR_NAMES = {"lora_A", "lora_B"}


class Route(NamedTuple):
    """Where one parameter goes and why."""

    names: tuple[str, ...]  # of a shared parameter there are several; the first is the one that it goes by
    param: Tensor
    options: dict[str, Any]
    matrices: dict[str, Any]  # the options that say what a matrix of it is, should it go to Muon
    why: str

    def matches(self, pattern: str) -> bool:
        return any(fnmatchcase(name, pattern) for name in self.names)


class ParamGroups(list[dict[str, Any]]):
    """A list of parameter groups for ``Muon``; printed, it is a table of what went where and why."""

    def __init__(self, routes: list[Route]) -> None:
        self.routes = routes
        groups: dict[object, dict[str, Any]] = {}
        for route in routes:
            group = groups.setdefault(_identity(route.options), {"params": [], **route.options})
            group["params"].append((route.names[0], route.param))
        super().__init__(sorted(groups.values(), key=lambda group: group["algorithm"] != "muon"))

    def __str__(self) -> str:
        numbers = {name: i for i, group in enumerate(self) for name, _ in group["params"]}
        header = ("parameter", "shape", "group", "why")
        rows: list[tuple[str, ...]] = [
            (
                route.names[0],
                " × ".join(map(str, route.param.shape)) or "scalar",
                f"{numbers[route.names[0]]} {route.options['algorithm']}",
                route.why,
            )
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


def _identity(options: dict[str, Any]) -> object:
    """Equal for options of one group: learning rates that are tensors, and functions, are only equal to themselves."""
    by_id = {name: id(v) if isinstance(v, Tensor) or callable(v) else repr(v) for name, v in options.items()}
    return frozenset(by_id.items())


def param_groups(
    model: nn.Module,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Override] | None = None,
) -> ParamGroups:
    """Parameter groups for ``Muon``: hidden matrices, convolutions and experts to Muon, the rest to AdamW.

    Every trainable parameter comes exactly once, shared ones under their first name. The first line that fits counts:

    | what | goes to |
    |---|---|
    | embeddings of tokens, positions, types; class, register and mask tokens; latents | AdamW |
    | norms, scalars, vectors, biases (2-D ones of experts too) | AdamW |
    | the output head: tied, as wide as a vocabulary, named like one, or the model's last layer | AdamW |
    | input layers: patch embeddings; the first convolution where no other layer comes before it | AdamW |
    | depthwise convolutions (a filter a channel: no matrix) | AdamW |
    | the gate or router that chooses experts; Mamba's decay rates ``A_log`` | AdamW |
    | matrices with one row or one column (a shared expert's gate, a value head) | AdamW |
    | convolutions, seen as (out, everything else); each group of a grouped one apart | Muon, ``split=groups`` |
    | experts stacked in 3-D | Muon, each a matrix |
    | the fused weights of ``nn.MultiheadAttention`` and of recurrent layers | Muon, ``split=3`` or 4 |
    | weights stored (in, out): GPT-2's ``Conv1D``, GPT-OSS's experts | Muon, ``matrix="transposed"`` |
    | every other matrix; the factors of LoRA, which are matrices too | Muon |

    It goes by types of modules, by shapes, and by the names that common models use, so read the table once. Where it
    says "fused", a weight seems to hold several matrices in an order that only its model knows: blocks of rows are set
    apart by an override, ``{"*.qkv.weight": {"split": 3}}``.

    Args:
        model: the model; frozen parameters are left out.
        muon: options of the Muon groups, such as ``{"lr": 0.02}``.
        adamw: options of the AdamW groups, such as ``{"lr": 3e-4, "weight_decay": 0.0}``.
        overrides: by name: a shell-style pattern to ``"muon"``, ``"adamw"``, or a dict of options, which may have
            ``"algorithm"``. Where several patterns match, later ones overrule earlier ones, option by option. A shared
            parameter answers to all of its names.

    Returns:
        The groups, a list; ``print`` shows a table of every parameter with its shape, its group and why.

    Raises:
        ValueError: a pattern that matches no parameter, an option or algorithm that isn't one, or a lazy layer that
            hasn't been called.

    Example:
        >>> import torch
        >>> from muon import param_groups
        >>> model = torch.nn.Sequential(torch.nn.Embedding(65, 32), torch.nn.Linear(32, 128), torch.nn.LayerNorm(128))
        >>> print(param_groups(model))
        parameter  shape     group    why
        ---------  --------  -------  -------------
        0.weight   65 × 32   1 adamw  embedding
        1.weight   128 × 32  0 muon   hidden matrix
        1.bias     128       1 adamw  vector
        2.weight   128       1 adamw  norm
        2.bias     128       1 adamw  norm
        4,096 elements to Muon, 2,464 to AdamW

    Source: https://github.com/KellerJordan/Muon: hidden weights to Muon, of a network of convolutions all filters but
    the first; embeddings, heads, gains and biases to AdamW.
    """
    defaults = {"muon": dict(muon or {}), "adamw": dict(adamw or {})}
    for argument, options in defaults.items():
        _check_names(argument, options)
    routes = [_override(route, overrides or {}) for route in _routes(model)]
    for pattern in overrides or {}:
        if not any(route.matches(pattern) for route in routes):
            raise ValueError(f"overrides: the pattern {pattern!r} matches no trainable parameter")
    return ParamGroups([_complete(route, defaults) for route in routes])


def _complete(route: Route, defaults: dict[str, dict[str, Any]]) -> Route:
    algorithm = route.options["algorithm"]
    matrices = route.matrices if algorithm == "muon" else {}
    return route._replace(options={**defaults[algorithm], **matrices, **route.options})


def _check_names(argument: str, options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in OPTIONS:
            raise ValueError(f"{argument}: there is no option {name!r}; options are {', '.join(sorted(OPTIONS))}")


def _override(route: Route, overrides: Mapping[str, Override]) -> Route:
    for pattern, override in overrides.items():
        if route.matches(pattern):
            options = {"algorithm": override} if isinstance(override, str) else dict(override)
            if "use_muon" in options:
                options["algorithm"] = "muon" if options.pop("use_muon") else "adamw"
            _check_names("overrides", options)
            route = route._replace(options={**route.options, **options}, why=f"override {pattern!r}")
            if route.options["algorithm"] not in ("muon", "adamw"):
                raise ValueError(f"overrides: {pattern!r} should go to 'muon' or 'adamw' but is: {override!r}")
    return route


def _routes(model: nn.Module) -> Iterator[Route]:
    modules = dict(model.named_modules(remove_duplicate=False))
    places = dict.fromkeys(_input_weights(model), "input layer") | dict.fromkeys(_head_weights(model), "output head")
    names: dict[int, list[str]] = {}
    params = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
        params[id(param)] = param
    for key, param in params.items():
        if not param.requires_grad:
            continue
        if is_lazy(param):
            raise ValueError(f"{names[key][0]} has no shape yet: call the model once before param_groups")
        owner, leaf = _owner_and_leaf(names[key][0])
        matrices, kind = _matrices(owner, leaf, modules[owner], param)
        why = _reason_for_adamw(owner, leaf, modules, param, places.get(key, ""))
        algorithm = "adamw" if why else "muon"
        yield Route(tuple(names[key]), param, {"algorithm": algorithm}, matrices, why or kind)


def _owner_and_leaf(name: str) -> tuple[str, str]:
    """Its module and its name there; conv.parametrizations.weight.original1 is conv's weight."""
    owner, _, leaf = name.rpartition(".")
    if "parametrizations" in owner.split("."):
        owner, _, leaf = f".{owner}".rpartition(".parametrizations.")
    return owner.removeprefix("."), leaf


def _matrices(owner: str, leaf: str, module: nn.Module, param: Tensor) -> tuple[dict[str, Any], str]:
    """The options that say what a matrix of the parameter is, and its name in the table."""
    if isinstance(module, CONVOLUTIONS):
        if module.groups == 1:
            return {"matrix": "flatten"}, "convolution"
        return {"matrix": "flatten", "split": module.groups}, f"convolution, {module.groups} groups"
    if isinstance(module, nn.MultiheadAttention) and leaf == "in_proj_weight":
        return {"split": 3}, "hidden matrix, q k v"
    gates = next((number for kind, number in RECURRENT_GATES.items() if isinstance(module, kind)), 1)
    if gates > 1 and "weight_hr" not in leaf:
        return {"split": gates}, f"hidden matrix, {gates} gates"
    if param.ndim > 3:
        return {}, "convolution"
    kind = "experts" if param.ndim == 3 else "hidden matrix"
    if not FACTOR_NAMES.isdisjoint(owner.split(".")):
        kind = "low-rank factor"
    if not FUSED_NAMES.isdisjoint([owner.rpartition(".")[2], leaf]):
        kind += ", fused"
    classes = {kind.__name__ for kind in type(module).__mro__}  # FSDP and parametrizations derive classes of their own
    if "Conv1D" in classes or getattr(module, "is_transposed", False):
        return {"matrix": "transposed"}, f"{kind}, stored (in, out)"
    return {}, kind


def _reason_for_adamw(owner: str, leaf: str, modules: dict[str, nn.Module], param: Tensor, place: str) -> str:
    module = modules[owner]
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if isinstance(module, NORMS) or (param.ndim < 2 and "Norm" in type(module).__name__):
        return "norm"
    if param.ndim < 2:
        return "vector" if param.ndim else "scalar"
    if place:
        return place
    if isinstance(module, CONVOLUTIONS) and 1 < module.groups == module.in_channels:
        return "depthwise convolution"
    if leaf in ROUTER_NAMES or _is_router(owner, modules, param):
        return "gate"
    if not isinstance(module, LAYERS):
        if "bias" in leaf:
            return "bias"
        if leaf == "A_log":
            return "decay rates"
        if _looks_like_embedding(leaf, module, param):
            return "embedding"
    return "vector" if _is_vector(module, param) else ""


def _is_router(owner: str, modules: dict[str, nn.Module], param: Tensor) -> bool:
    """A gate chooses among fewer experts than its input is wide; that of a gated MLP has a sibling of its own shape."""
    parent, _, name = owner.rpartition(".")
    if name not in ROUTER_NAMES and parent.rpartition(".")[2] not in ROUTER_NAMES:
        return False
    twins = [m for m in modules[parent].children() if isinstance(m, nn.Linear) and m.weight.shape == param.shape]
    return param.ndim == 2 and param.shape[0] < param.shape[1] and (name not in ROUTER_NAMES or len(twins) < 2)


def _looks_like_embedding(leaf: str, module: nn.Module, param: Tensor) -> bool:
    """Position tables, class and register tokens: of a module's own, often of leading size 1, or with a name."""
    named = "Embedding" in type(module).__name__ or any(part in leaf.lower() for part in EMBEDDING_PARTS)
    return named or param.shape[0] == 1


def _is_vector(module: nn.Module, param: Tensor) -> bool:
    _, rows, cols = matrix_shape(param, "flatten" if isinstance(module, CONVOLUTIONS) else None)
    return min(rows, cols) == 1


def _input_weights(model: nn.Module) -> set[int]:
    """Weights of patch embeddings, and of the first convolution where no other layer comes before it."""
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, (nn.Embedding, *LAYERS))]
    found = [layer for name, layer in layers if "patch_embed" in name]
    if layers and isinstance(layers[0][1], CONVOLUTIONS):
        found.append(layers[0][1])
    return _ids(found)


def _head_weights(model: nn.Module) -> set[int]:
    """Weights shared with an embedding, and those of output layers."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    named = [m for name, m in model.named_modules() if name.rpartition(".")[2] in VOCABULARY_HEAD_NAMES]
    top = dict(_body(model).named_children())
    named += [m for name, m in top.items() if name.split("_")[-1].lower() in HEAD_WORDS]
    outputs = [layer for m in named for layer in _last_layers(m)]
    return _ids([*embeddings, *outputs, *_last_in_sequence(_body(model)), *_as_wide_as_a_vocabulary(model)])


def _ids(modules: Iterable[nn.Module]) -> set[int]:
    return {id(p) for module in modules for p in module.parameters()}


def _body(model: nn.Module) -> nn.Module:
    """The model inside its wrappers: DistributedDataParallel, torch.compile, a trainer's module."""
    children = [child for child in model.children() if any(True for _ in child.parameters())]
    is_wrapper = len(children) == 1 and not any(True for _ in model.parameters(recurse=False))
    if is_wrapper and not isinstance(model, (nn.ModuleList, nn.Sequential)):
        return _body(children[0])
    return model


def _last_layers(module: nn.Module) -> list[nn.Module]:
    """The output layers of a head: its last one, or that of each of the heads in a list."""
    if isinstance(module, LAYERS):
        return [module]
    parts = [layers for child in module.children() if (layers := _last_layers(child))]
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return [layer for layers in parts for layer in layers]
    return parts[-1] if parts else []


def _last_in_sequence(module: nn.Module) -> list[nn.Module]:
    """A model's last layer, if it is one: nothing is said about the inside of the last block."""
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    if not children:
        return []
    last = children[-1]
    return _last_in_sequence(last) if isinstance(last, nn.Sequential) else [last] if isinstance(last, LAYERS) else []


def _as_wide_as_a_vocabulary(model: nn.Module) -> list[nn.Module]:
    """Linear layers with as many outputs as a vocabulary has entries; one of many alike in a list is a hidden one."""
    vocabularies = {
        module.num_embeddings
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and not any(part in name.lower() for part in POSITION_PARTS)
    }
    modules = dict(model.named_modules())
    return [
        module
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and module.out_features in vocabularies and not _is_in_a_list(name, modules)
    ]


def _is_in_a_list(name: str, modules: dict[str, nn.Module]) -> bool:
    parent = name.rpartition(".")[0]
    return any(part.isdigit() for part in parent.split(".")) or isinstance(modules[parent], nn.ModuleList)
