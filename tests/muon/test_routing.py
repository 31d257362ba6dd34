import pytest
import torch
from torch import nn

from muon import Muon, param_groups


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)  # a hidden layer, whatever its name
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.gate = nn.Linear(width, 4, bias=False)
        self.experts = nn.Parameter(torch.zeros(4, width, width))
        self.scale = nn.Parameter(torch.ones(()))


class GPT(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, 8)
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, 8))
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.lm_head = nn.Linear(8, 50, bias=False)
        self.unnamed_projection = nn.Linear(8, 50, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


def algorithms(groups) -> dict[str, str]:
    return {name: group["algorithm"] for group in groups for name, _ in group["params"]}


@pytest.mark.parametrize("tied", [False, True])
def test_gpt(tied):
    model = GPT(tied)
    groups = param_groups(model, muon={"lr": 0.02}, adamw={"lr": 1e-3, "weight_decay": 0.0})
    found = algorithms(groups)
    muon = {
        f"blocks.{i}.{name}"
        for i in range(2)
        for name in ("qkv.weight", "output.weight", "gate_proj.weight", "experts")
    }
    assert {name for name, algorithm in found.items() if algorithm == "muon"} == muon
    ids = [id(p) for group in groups for _, p in group["params"]]
    assert len(ids) == len(set(ids)) and set(ids) == {id(p) for p in model.parameters()}
    assert [(group["algorithm"], group["lr"]) for group in groups] == [("muon", 0.02), ("adamw", 1e-3)]
    optimizer = Muon(groups)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in groups[0]["params"]]


def test_convolutions_and_a_resnet_head():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3)
            self.conv = nn.Conv2d(8, 8, 3)
            self.conv1d = nn.Conv1d(8, 8, 3)
            self.bn = nn.BatchNorm2d(8)
            self.fc = nn.Linear(8, 10)

    groups = param_groups(Net())
    found = algorithms(groups)
    assert {name for name, algorithm in found.items() if algorithm == "muon"} == {"conv.weight", "conv1d.weight"}
    assert groups[0]["matrix"] == "flatten"


def test_a_linear_as_wide_as_the_vocabulary_is_the_head():
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50))
    assert algorithms(param_groups(model))["2.weight"] == "adamw"


def test_names_that_mislead():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 8)
            self.decoder = nn.Linear(8, 50, bias=False)  # the head, though not the last
            self.value = nn.Linear(8, 1, bias=False)
            self.w1_bias = nn.Parameter(torch.zeros(4, 8))  # of experts
            self.mlp = nn.ModuleDict({"gate": nn.Linear(8, 16, bias=False), "output": nn.Linear(8, 8, bias=False)})

    found = algorithms(param_groups(Net()))
    assert {name for name, algorithm in found.items() if algorithm == "adamw"} == {
        "embedding.weight",
        "decoder.weight",
        "value.weight",
        "w1_bias",
    }


def test_a_wrapped_head_is_a_head():
    model = nn.ModuleDict({"fc": nn.Linear(8, 10), "body": nn.Linear(8, 8), "norm": nn.LayerNorm(8)})
    for wrapped in (nn.ModuleDict({"module": model}), nn.ModuleDict({"net": nn.ModuleDict({"_orig_mod": model})})):
        found = algorithms(param_groups(wrapped))
        assert [algorithm for name, algorithm in found.items() if "fc.weight" in name] == ["adamw"]
        assert [algorithm for name, algorithm in found.items() if "body.weight" in name] == ["muon"]


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    assert set(algorithms(param_groups(model))) == {"1.weight", "1.bias"}


def test_overrides_by_pattern_the_last_match_counts():
    model = GPT(tied=False)
    groups = param_groups(
        model,
        muon={"lr": 0.02},
        adamw={"lr": 1e-3},
        overrides={"blocks.*": "adamw", "blocks.1.qkv.weight": {"algorithm": "muon", "split": 3}, "wte.*": {"lr": 0.5}},
    )
    found = algorithms(groups)
    assert [name for name, algorithm in found.items() if algorithm == "muon"] == ["blocks.1.qkv.weight"]
    assert groups[0]["split"] == 3 and groups[0]["lr"] == 0.02
    (embedding,) = (group for group in groups if group["lr"] == 0.5)
    assert [name for name, _ in embedding["params"]] == ["wte.weight"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"nothing.*": "muon"}, r"'nothing\.\*' matches no trainable parameter"),
        ({"wte.*": {"Lr": 1.0}}, "overrides: there is no option 'Lr'"),
        ({"wte.*": "sgd"}, "should go to 'muon' or 'adamw' but is: 'sgd'"),
    ],
)
def test_bad_overrides(overrides, message):
    with pytest.raises(ValueError, match=message):
        param_groups(GPT(tied=False), overrides=overrides)


def test_a_later_pattern_overrules_option_by_option():
    overrides = {"blocks.*": {"lr": 0.1, "momentum": 0.8}, "blocks.0.*": {"lr": 0.2}, "blocks.0.qkv.*": "adamw"}
    groups = param_groups(GPT(tied=False), overrides=overrides)
    options = {name: {**group, "params": None} for group in groups for name, _ in group["params"]}
    assert (options["blocks.1.experts"]["lr"], options["blocks.0.experts"]["lr"]) == (0.1, 0.2)
    assert options["blocks.0.experts"]["momentum"] == 0.8
    assert (options["blocks.0.qkv.weight"]["algorithm"], options["blocks.0.qkv.weight"]["lr"]) == ("adamw", 0.2)


def test_a_shared_parameter_answers_to_all_of_its_names_and_comes_once():
    groups = param_groups(GPT(tied=True), overrides={"lm_head.weight": {"lr": 0.5}})
    (group,) = (group for group in groups if group.get("lr") == 0.5)
    assert [name for name, _ in group["params"]] == ["wte.weight"]


def test_hidden_layers_that_share_a_weight_are_one_matrix():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    model[1].weight = model[0].weight
    assert list(algorithms(param_groups(model))) == ["0.weight", "0.bias", "1.bias", "2.weight", "2.bias"]


def test_a_convolution_stays_one_under_an_override():
    """A Conv1d sent to Muon by hand used to be taken for a batch of experts."""
    model = nn.Sequential(nn.Conv1d(2, 8, 3), nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8))
    (muon, adamw) = param_groups(model, overrides={"0.weight": "muon", "1.weight": "adamw"})
    assert [name for name, _ in muon["params"]] == ["0.weight"] and muon["matrix"] == "flatten"
    assert "matrix" not in adamw


def test_use_muon_in_an_override():
    groups = param_groups(GPT(tied=False), overrides={"blocks.0.qkv.weight": {"use_muon": False}})
    assert algorithms(groups)["blocks.0.qkv.weight"] == "adamw"


def test_a_lazy_layer_is_asked_to_be_called_first():
    """It looked like a vector, and its matrix went to AdamW."""
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet: call the model once before param_groups"):
        param_groups(model)
    model(torch.zeros(1, 4))
    assert param_groups(model)[0]["params"][0][0] == "0.weight"


def test_learning_rates_that_are_tensors_stay_apart():
    """Those that print alike shared a group, and one of them was lost."""
    first, second = torch.tensor(0.10001), torch.tensor(0.1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    groups = param_groups(model, muon={"lr": second}, overrides={"0.weight": {"lr": first}})
    rates = {name: group.get("lr") for group in groups for name, _ in group["params"]}
    assert rates["0.weight"] is first and rates["1.weight"] is second and rates["2.weight"] is second
    assert len(groups) == 3


def test_misspelt_options():
    with pytest.raises(ValueError, match=r"muon: there is no option 'Lr'; options are .*lr"):
        param_groups(GPT(tied=False), muon={"Lr": 1.0})


def test_the_table_names_every_parameter_once_with_shape_group_and_why():
    model = GPT(tied=True)
    groups = param_groups(model, overrides={"blocks.1.experts": {"lr": 0.5}})
    table = str(groups).splitlines()
    body = {line.split()[0]: line for line in table[2:-1]}
    assert list(body) == [name for name, _ in model.named_parameters()]
    for name, why in [
        ("wte.weight", "embedding"),
        ("pos_embed", "embedding"),
        ("blocks.0.norm.weight", "norm"),
        ("blocks.0.qkv.bias", "vector"),
        ("blocks.0.gate.weight", "gate"),
        ("blocks.0.scale", "scalar"),
        ("unnamed_projection.weight", "output head"),
        ("blocks.0.experts", "experts"),
        ("blocks.0.qkv.weight", "hidden matrix, fused"),
    ]:
        assert body[name].endswith(why)
    assert "24 × 8" in body["blocks.0.qkv.weight"]
    assert all(
        f" {i} {group['algorithm']} " in body[name] for i, group in enumerate(groups) for name, _ in group["params"]
    )
    muon = sum(p.numel() for name, p in model.named_parameters() if " muon " in body[name])
    assert table[-1].startswith(f"{muon:,} elements to Muon")
