"""What goes where in whole architectures, written small, and in those of transformers."""

import inspect
import math
import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from examples.gpt.model import GPT
from muon import Muon, param_groups
from muon.options import lr_factor

SECOND = re.compile(r"(layers?|blocks?|h|encoder)\.1\.")


def routes(model, **options) -> dict[str, str]:
    """Parameter to algorithm and why, read from the printed table; checks that each is there once and trains."""
    groups = param_groups(model, **options)
    table = [re.split(r"  +", line) for line in str(groups).splitlines()[2:-1]]
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert [row[0] for row in table] == list(trainable)
    assert [row[1] for row in table] == [" × ".join(map(str, p.shape)) or "scalar" for p in trainable.values()]
    listed = [p for group in groups for _, p in group["params"]]
    assert sorted(map(id, listed)) == sorted(map(id, trainable.values()))

    optimizer = Muon(groups, lr=0.1)
    for p in listed:
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    before = [p.detach().clone() for p in listed]
    optimizer.step()
    assert all(p.isfinite().all() and not torch.equal(p, old) for p, old in zip(listed, before, strict=True))
    return {name: f"{group.split()[1]}: {why}" for name, _, group, why in table}


def matrices(found: dict[str, str]) -> dict[str, str]:
    """Only Muon's, of the first of several equal layers."""
    first = {name: why for name, why in found.items() if not SECOND.search(name)}
    return {name: why.removeprefix("muon: ") for name, why in first.items() if why.startswith("muon")}


def others(found: dict[str, str]) -> dict[str, str]:
    """AdamW's with two dimensions or more, of the first of several equal layers."""
    dull = ("vector", "norm", "scalar")
    first = {name: why for name, why in found.items() if not SECOND.search(name)}
    return {name: why.removeprefix("adamw: ") for name, why in first.items() if why[7:] not in dull and why[0] == "a"}


def named(kind: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, kind)


def test_the_gpt_of_the_example():
    found = routes(GPT(layers=2, heads=2, width=16, context=8, vocab_size=20))
    assert others(found) == named("embedding", "embedding.weight")
    assert matrices(found) == {
        "blocks.0.attention.qkv.weight": "hidden matrix, fused",
        **named("hidden matrix", *(f"blocks.0.{name}.weight" for name in ("attention.out", "mlp.up", "mlp.down"))),
    }


class GPT2Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)


class NanoGPT(nn.Module):
    def __init__(self, width: int = 16, context: int = 16, blocks=nn.ModuleList) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(20, width), nn.Embedding(context, width)
        self.h = blocks([GPT2Block(width) for _ in range(2)]) if blocks is nn.ModuleList else blocks(GPT2Block(width))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 20, bias=False)
        self.lm_head.weight = self.wte.weight


@pytest.mark.parametrize("blocks", [nn.ModuleList, nn.Sequential])
@pytest.mark.parametrize("positions", ["wpe", "table"])
def test_a_context_as_long_as_the_model_is_wide(positions, blocks):
    """GPT-2 medium's hidden matrices of 1024 x 1024 used to be taken for heads, for it has 1024 positions."""
    model = NanoGPT(width=16, context=16, blocks=blocks)
    if positions == "table":
        model.table = model.wpe
        del model.wpe
    found = routes(model)
    assert others(found) == named("embedding", "wte.weight", f"{positions}.weight")
    assert list(matrices(found)) == [f"h.0.{name}.weight" for name in ("c_attn", "c_proj", "c_fc", "c_out")]


class LlamaBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)
        # An MLP narrower than the model, as an expert's is: its gate is not one that chooses experts.
        self.gate, self.up = nn.Linear(width, 12, bias=False), nn.Linear(width, 12, bias=False)
        self.down = nn.Linear(12, width, bias=False)


def test_llama_with_grouped_queries_and_a_gated_mlp():
    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok_embeddings = nn.Embedding(20, 16)
            self.layers = nn.ModuleList(LlamaBlock(16) for _ in range(2))
            self.norm = nn.RMSNorm(16)
            self.output = nn.Linear(16, 20, bias=False)

    found = routes(Llama())
    assert others(found) == {"tok_embeddings.weight": "embedding", "output.weight": "output head"}
    names = ("wq", "wo", "wk", "wv", "gate", "up", "down")
    assert matrices(found) == named("hidden matrix", *(f"layers.0.{name}.weight" for name in names))


def test_a_mixture_of_experts():
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(16, 4, bias=False)
            self.gate_up_proj, self.down_proj = (
                nn.Parameter(torch.zeros(4, 24, 16)),
                nn.Parameter(torch.zeros(4, 16, 12)),
            )
            self.w1_bias = nn.Parameter(torch.zeros(4, 24))
            self.shared = LlamaBlock(16)
            self.shared_expert_gate = nn.Linear(16, 1, bias=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 16)
            self.layers = nn.ModuleList(Experts() for _ in range(2))
            self.norm = nn.RMSNorm(16)

    found = routes(Model())
    assert others(found) == {
        "embed.weight": "embedding", "layers.0.router.weight": "gate", "layers.0.w1_bias": "bias",
    }  # fmt: skip
    assert found["layers.0.shared_expert_gate.weight"] == "adamw: vector"
    muon = matrices(found)
    assert muon["layers.0.gate_up_proj"] == "experts, fused" and muon["layers.0.down_proj"] == "experts"
    assert len(muon) == 2 + 7


def test_a_resnet():
    class Block(nn.Module):
        def __init__(self, inside: int, outside: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, bias=False), nn.BatchNorm2d(outside)
            self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, bias=False, groups=2), nn.BatchNorm2d(outside)
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside))

    class ResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 8, 7, bias=False), nn.BatchNorm2d(8)
            self.layer1 = nn.Sequential(Block(8, 8))
            self.fc = nn.Linear(8, 10)

    model = ResNet().to(memory_format=torch.channels_last)
    found = routes(model)
    assert others(found) == {"conv1.weight": "input layer", "fc.weight": "output head"}
    assert matrices(found) == {
        "layer1.0.conv1.weight": "convolution",
        "layer1.0.conv2.weight": "convolution, 2 groups",
        "layer1.0.downsample.0.weight": "convolution",
    }


def test_a_vision_transformer():
    class ViT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.class_token = nn.Parameter(torch.zeros(1, 1, 16))
            self.pos_embedding = nn.Parameter(torch.zeros(1, 5, 16))
            self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, 16, 4, 4)})
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24), 2, enable_nested_tensor=False)
            self.heads = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 10))

    found = routes(ViT())
    assert others(found) == {
        "class_token": "embedding",
        "pos_embedding": "embedding",
        "patch_embed.proj.weight": "input layer",
        "heads.1.weight": "output head",
    }
    layer = "encoder.layers.0"
    assert matrices(found) == {
        f"{layer}.self_attn.in_proj_weight": "hidden matrix, q k v",
        **named("hidden matrix", *(f"{layer}.{name}.weight" for name in ("self_attn.out_proj", "linear1", "linear2"))),
    }


def test_a_vision_tower_behind_a_text_tower():
    """Its patch embedding isn't the first layer; and embeddings of one's own are known by what they are called."""

    class VocabParallelEmbedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(20, 8))

    text = nn.ModuleDict({"tokens": VocabParallelEmbedding(), "fc": nn.Linear(8, 8)})
    vision = nn.ModuleDict({"patch_embed": nn.Linear(48, 8), "conv": nn.Conv2d(8, 8, 3), "norm": nn.LayerNorm(8)})
    found = routes(nn.ModuleDict({"text": text, "vision": vision}))
    assert others(found) == {"text.tokens.weight": "embedding", "vision.patch_embed.weight": "input layer"}
    assert matrices(found) == {"text.fc.weight": "hidden matrix", "vision.conv.weight": "convolution"}


def test_a_network_of_depthwise_convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 4), nn.Conv2d(8, 8, 7, groups=8), nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.Linear(16, 3)
    )
    found = routes(model)
    assert matrices(found) == {"2.weight": "convolution"}
    assert others(found)["1.weight"] == "depthwise convolution"


def test_convolutions_inside_and_parametrized_ones():
    """A weight-normalised Conv1d used to be taken for experts, a batch of matrices (in, kernel)."""
    model = nn.ModuleDict(
        {
            "stem": nn.Conv1d(2, 8, 3),
            "conv": nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3)),
            "norm": nn.BatchNorm1d(8),
        }
    )
    found = routes(model)
    assert found["conv.parametrizations.weight.original0"] == "adamw: vector"
    assert found["conv.parametrizations.weight.original1"] == "muon: convolution"


def test_recurrent_layers():
    model = nn.ModuleDict({"embed": nn.Embedding(20, 8), "rnn": nn.LSTM(8, 8, proj_size=4), "gru": nn.GRU(4, 8)})
    groups = param_groups(model)
    splits = {name: group.get("split") for group in groups for name, _ in group["params"]}
    assert (splits["rnn.weight_ih_l0"], splits["rnn.weight_hr_l0"], splits["gru.weight_hh_l0"]) == (4, None, 3)
    assert routes(model)["rnn.weight_hh_l0"] == "muon: hidden matrix, 4 gates"


class Conv1D(nn.Module):
    """Transformers' has weight (in, out), and this name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 24))


def test_classes_derived_by_fsdp_and_parametrizations_count_as_what_they_are():
    model = nn.ModuleDict({"embed": nn.Embedding(20, 8), "conv": Conv1D(), "rnn": nn.GRUCell(8, 8)})
    for module in model.values():
        module.__class__ = type(f"FSDP{type(module).__name__}", (type(module),), {})
    found = routes(model)
    assert found["embed.weight"] == "adamw: embedding"
    assert found["conv.weight"] == "muon: hidden matrix, stored (in, out)"
    assert found["rnn.weight_hh"] == "muon: hidden matrix, 3 gates"


PARTS = {
    "linear": lambda: nn.Linear(4, 6),
    "square": lambda: nn.Linear(4, 4, bias=False),
    "embedding": lambda: nn.Embedding(6, 4),
    "convolution": lambda: nn.Conv1d(4, 4, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4),
    "transposed": lambda: nn.ConvTranspose2d(4, 8, 2, groups=2),
    "normalised": lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3)),
    "attention": lambda: nn.MultiheadAttention(4, 2),
    "recurrent": lambda: nn.LSTM(4, 4),
    "bilinear": lambda: nn.Bilinear(4, 4, 3),
    "norm": lambda: nn.LayerNorm((2, 4)),
    "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
    "transformers'": Conv1D,
}
trees = st.recursive(
    st.sampled_from(sorted(PARTS)),
    lambda inner: st.tuples(st.sampled_from([nn.Sequential, nn.ModuleList]), st.lists(inner, min_size=1, max_size=4)),
    max_leaves=10,
)


def grow(tree) -> nn.Module:
    if isinstance(tree, str):
        return PARTS[tree]()
    kind, parts = tree
    modules = [grow(part) for part in parts]
    return nn.Sequential(*modules) if kind is nn.Sequential else nn.ModuleList(modules)


@settings(max_examples=30)
@given(tree=trees, tie=st.booleans())
@example(tree="linear", tie=False)
@example(tree="frozen", tie=False)
def test_whatever_the_model_every_parameter_is_there_once_and_muon_takes_it(tree, tie):
    model = nn.ModuleDict({"body": grow(tree), "norm": nn.LayerNorm(4)})
    squares = [m for m in model.modules() if type(m) is nn.Linear and m.out_features == 4]
    if tie:
        for square in squares[1:]:
            square.weight = squares[0].weight
    found = routes(model)
    matrices = [name for name in found if model.get_parameter(name).ndim > 1]
    assert {name for name, where in found.items() if where.startswith("muon")} <= set(matrices)
    moved = routes(model, overrides={"*": "adamw", **dict.fromkeys(matrices, "muon")})
    assert [name for name, where in moved.items() if where.startswith("muon")] == matrices


def test_low_rank_factors_train_while_the_rest_is_frozen():
    class LoRA(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(16, 16).requires_grad_(False)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(16, 2, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 16, bias=False)})

    model = nn.ModuleDict({"embed": nn.Embedding(20, 16).requires_grad_(False), "proj": LoRA(), "norm": nn.RMSNorm(16)})
    found = routes(model)
    assert matrices(found) == named("low-rank factor", "proj.lora_A.default.weight", "proj.lora_B.default.weight")
    assert set(found) - set(matrices(found)) == {"norm.weight"}


@pytest.mark.parametrize(
    ("head", "outputs"),
    [
        (nn.Linear(8, 3), {"classifier.weight"}),
        (nn.Sequential(nn.Dropout(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), {"classifier.3.weight"}),
        (nn.ModuleDict({"a": nn.Linear(8, 3), "b": nn.Linear(8, 5)}), {"classifier.a.weight", "classifier.b.weight"}),
        (nn.ModuleDict({"a": nn.Sequential(nn.Linear(8, 8), nn.Conv2d(8, 5, 1))}), {"classifier.a.1.weight"}),
    ],
)
def test_of_a_head_only_what_comes_last_is_the_output(head, outputs):
    model = nn.ModuleDict({"body": nn.Linear(8, 8), "classifier": head, "norm": nn.LayerNorm(8)})
    assert set(others(routes(model))) == outputs


def test_the_last_layer_of_a_plain_network_is_its_output():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.relu = nn.Linear(8, 8), nn.Linear(8, 3), nn.ReLU()

    assert others(routes(Net())) == {"fc2.weight": "output head"}
    nested = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 3)), nn.Softmax(-1))
    assert others(routes(nested)) == {"1.1.weight": "output head"}
    block = nn.Sequential(nn.Linear(8, 8), LlamaBlock(8))  # a block's last layer is a hidden one
    assert not others(routes(block))


@pytest.mark.parametrize("neuron_norm", [None, 0.95])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize(
    ("shape", "split"), [((8, 24), None), ((24, 8), None), ((3, 8, 24), None), ((24, 8), (8, 12, 4))]
)
def test_a_weight_stored_in_out_trains_as_its_transpose_does(shape, split, adjust_lr_fn, neuron_norm):
    """GPT-2's c_fc used to take a learning rate half of what an nn.Linear's takes, its c_proj twice as much."""
    options = {"lr": 0.1, "adjust_lr_fn": adjust_lr_fn, "split": split}
    if neuron_norm:
        if "neuron_norm" not in inspect.signature(Muon).parameters:
            pytest.skip(reason="Muon has no neuron_norm")
        options["neuron_norm"] = neuron_norm
    start, *gradients = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = start.clone().requires_grad_()
    stored = start.mT.contiguous().requires_grad_()
    optimizers = Muon([expected], **options), Muon([stored], matrix="transposed", **options)
    for gradient in gradients:
        expected.grad, stored.grad = gradient, gradient.mT.contiguous()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(stored.mT, expected)
    for name, state in optimizers[0].state[expected].items():
        torch.testing.assert_close(optimizers[1].state[stored][name].mT, state)


@pytest.mark.parametrize(
    ("shape", "options"),
    [((8, 24), {}), ((2, 24, 8), {}), ((24, 8), {"split": 3}), ((24, 8), {"neuron_norm": 0.9})],
    ids=str,
)
def test_a_weight_stored_in_out_on_the_kernels(monkeypatch, shape, options):
    pytest.importorskip("triton", reason="kernels need triton, which is for Linux only")
    if not options.keys() <= inspect.signature(Muon).parameters.keys():
        pytest.skip(reason="Muon has no neuron_norm")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setattr("muon.optimizer.uses_triton", lambda backend, tensor: True)
    start, gradient = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).to(device)
    expected, stored = start.clone().requires_grad_(), start.mT.contiguous().requires_grad_()
    expected.grad, stored.grad = gradient, gradient.mT.contiguous()
    Muon([expected], lr=0.1, ns_steps=1, **options).step()
    Muon([stored], lr=0.1, ns_steps=1, matrix="transposed", **options).step()
    # Blocks of columns are packed by torch: the same numbers, but for the 16 bits of a GPU's iteration.
    tolerance = 0.1 * 2**-7 if device == "cuda" else 1e-6
    torch.testing.assert_close(stored.mT, expected, rtol=0, atol=tolerance)


def test_the_factor_of_a_transposed_matrix():
    assert lr_factor(None, 4, 1) == math.sqrt(4)  # rows are outputs
    with pytest.raises(ValueError, match="split=5 should divide the 8 rows"):
        Muon([torch.zeros(4, 8)], matrix="transposed", split=5)


@pytest.fixture(scope="module")
def transformers():
    module = pytest.importorskip("transformers", reason="transformers isn't installed")
    module.logging.set_verbosity_error()
    return module


def small(transformers, config: str, model: str, **options):
    """A model of transformers from a configuration of our own: nothing is downloaded."""
    sides = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 20, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return getattr(transformers, model)(getattr(transformers, config)(**{**sides, **tokens, **options}))


def test_gpt2_of_transformers(transformers):
    sides = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "bos_token_id": None, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=20, **sides))
    found = routes(model)
    assert others(found) == named("embedding", "transformer.wte.weight", "transformer.wpe.weight")
    h = "transformer.h.0"
    assert matrices(found) == {
        f"{h}.attn.c_attn.weight": "hidden matrix, fused, stored (in, out)",
        **named(
            "hidden matrix, stored (in, out)",
            *(f"{h}.{name}.weight" for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
        ),
    }
    groups = param_groups(model, overrides={"*.c_attn.weight": {"split": 3}})
    forms = {name: (group.get("split"), group["matrix"]) for group in groups[:2] for name, _ in group["params"]}
    assert forms[f"{h}.attn.c_attn.weight"] == (3, "transposed") and forms[f"{h}.mlp.c_fc.weight"] == (
        None,
        "transposed",
    )


ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")


def test_llama_of_transformers(transformers):
    found = routes(small(transformers, "LlamaConfig", "LlamaForCausalLM", num_key_value_heads=1))
    assert others(found) == {"model.embed_tokens.weight": "embedding", "lm_head.weight": "output head"}
    names = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert matrices(found) == named("hidden matrix", *(f"model.layers.0.{name}.weight" for name in names))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Mixtral", {"num_local_experts": 4}),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
        ("Qwen2Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
        ("GptOss", {"num_local_experts": 4, "head_dim": 8, "layer_types": ["full_attention"] * 2}),
    ],
)
def test_mixtures_of_experts_of_transformers(transformers, family, options):
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(reason=f"this version of transformers has no {family}")
    found = routes(small(transformers, f"{family}Config", f"{family}ForCausalLM", num_key_value_heads=1, **options))
    kinds = {name: why for name, why in found.items() if "layers.0." in name}
    router = [why for name, why in kinds.items() if re.search(r"(gate|router)\.weight$", name) and "shared" not in name]
    assert router == ["adamw: gate"]
    assert all(
        why == "muon: hidden matrix" for name, why in kinds.items() if "self_attn" in name and "proj.weight" in name
    )
    experts = {why for name, why in kinds.items() if ".experts." in name and "bias" not in name}
    stored = ", stored (in, out)" if family == "GptOss" else ""
    stacked = {f"muon: experts, fused{stored}", f"muon: experts{stored}"}
    assert experts in (stacked, {"muon: hidden matrix"})  # versions before 5 keep experts in a list


def test_vit_of_transformers(transformers):
    found = routes(
        small(transformers, "ViTConfig", "ViTForImageClassification", image_size=8, patch_size=4, num_labels=3)
    )
    assert others(found) == {
        "vit.embeddings.cls_token": "embedding",
        "vit.embeddings.position_embeddings": "embedding",
        "vit.embeddings.patch_embeddings.projection.weight": "input layer",
        "classifier.weight": "output head",
    }
    assert set(matrices(found).values()) == {"hidden matrix"} and len(matrices(found)) == 6


def test_bert_of_transformers(transformers):
    options = {"max_position_embeddings": 16}  # as many as the model is wide
    found = routes(small(transformers, "BertConfig", "BertForMaskedLM", **options))
    embeddings = ("word_embeddings", "position_embeddings", "token_type_embeddings")
    assert others(found) == named("embedding", *(f"bert.embeddings.{name}.weight" for name in embeddings))
    assert len(matrices(found)) == 6 + 1 and found["cls.predictions.transform.dense.weight"] == "muon: hidden matrix"
    found = routes(small(transformers, "RobertaConfig", "RobertaForSequenceClassification", **options, pad_token_id=1))
    assert found["classifier.out_proj.weight"] == "adamw: output head"
    assert found["classifier.dense.weight"] == "muon: hidden matrix"


def test_t5_of_transformers(transformers):
    sides = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "vocab_size": 20}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sides, pad_token_id=0, eos_token_id=1))
    found = others(routes(model))
    assert set(found.values()) == {"embedding"} and len(found) == 3  # tokens, and relative positions of each side


def test_mamba_of_transformers(transformers):
    found = routes(small(transformers, "MambaConfig", "MambaForCausalLM", state_size=4))
    mixer = "backbone.layers.0.mixer"
    assert found[f"{mixer}.A_log"] == "adamw: decay rates"
    assert found[f"{mixer}.conv1d.weight"] == "adamw: depthwise convolution"
    assert found[f"{mixer}.in_proj.weight"] == "muon: hidden matrix"
