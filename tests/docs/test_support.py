"""The tables of docs/support.md say what the code does: an option is there exactly where its cell is "yes".

When an option has been built, these tests fail until its cells turn from "not yet" to "yes".
"""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from helpers.pages import ROOT

import attention
import muon
from attention import SelfAttention, backends, flash_attention, scaled_dot_product_attention
from attention.reference import Options
from muon import Muon

ROWS = dict(
    re.match(r"\| `([^`]+)`[^|]* \| (.*) \|$", line).groups()
    for line in (ROOT / "docs" / "support.md").read_text().splitlines()
    if line.startswith("| `")
)
BACKENDS = ["torch", "triton"]

MUON = [
    "matrix",
    "split",
    "maximize",
    "weight_decay_mode",
    "neuron_norm",
    "momentum_dtype",
    "bf16_remainder",
    "workspace",
    "foreach",
    "capturable",
    "distributed_group",
]

FLASH_ATTENTION = {
    "causal": True,
    "scale": 0.3,
    "return_lse": True,
    "deterministic": True,
    "window": (2, 0),
    "softcap": 10.0,
    "sinks": torch.zeros(2),
    "alibi_slopes": torch.ones(2),
    "dropout_p": 0.1,
    "return_max_logits": True,
}
MASK = torch.ones(4, 4, dtype=torch.bool)
SDPA = {"is_causal": True, "enable_gqa": True, "attn_mask": MASK, "dropout_p": 0.1}
SELF_ATTENTION = {"qk_norm": True, "rotary": True, "window": (2, 0), "max_logits": True}


def assert_said(name, found, column=0):
    said = ROWS[name].split("|")[column].strip()
    assert said == ("yes" if found else "not yet"), f"docs/support.md, column {column + 1} of the row {name}"


def is_there(call):
    try:
        call()
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("column", range(2), ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", MUON)
def test_options_of_muon(name, column):
    assert_said(name, name in inspect.signature(Muon).parameters, column)


@pytest.mark.parametrize("column", range(2), ids=BACKENDS)
@pytest.mark.parametrize("name", FLASH_ATTENTION)
def test_options_of_flash_attention(name, column):
    if BACKENDS[column] == "triton":
        pytest.importorskip("triton", reason="the Triton backend needs triton, which is for Linux only")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = torch.randn(3, 1, 4, 2, 16, device=device)
    value = FLASH_ATTENTION[name]
    value = value.to(device) if isinstance(value, torch.Tensor) else value
    found = is_there(lambda: flash_attention(q, k, v, **{name: value}, backend=BACKENDS[column]))
    assert_said(name, found, column)


def what_hopper_covers(monkeypatch, options, with_max_logits=False):
    """As docs/support.md words it, of tensors that claim to be on a Hopper GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    q = torch.empty(1, 256, 2, 64, dtype=torch.bfloat16, device="meta")
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=q.dtype, shape=q.shape, numel=q.numel)
    if not backends.runs_on_hopper("auto", on_gpu, q, options, with_max_logits):
        return "no"
    return "yes" if backends.backward_runs_on_hopper("auto", on_gpu, q, q, options) else "forward"


@pytest.mark.parametrize(
    ("name", "options", "with_max_logits"),
    [
        ("causal", Options(1.0, window_right=0), False),
        ("scale", Options(0.3), False),
        ("return_lse", Options(1.0), False),
        ("deterministic", Options(1.0, deterministic=True), False),
        ("window", Options(1.0, window_left=2, window_right=0), False),
        ("softcap", Options(1.0, softcap=10.0), False),
        ("sinks", Options(1.0, sinks=torch.zeros(2)), False),
        ("alibi_slopes", Options(1.0, slopes=torch.ones(1, 2)), False),
        ("dropout_p", Options(1.0, dropout_p=0.1, seed=torch.zeros(1)), False),
        ("return_max_logits", Options(1.0), True),
        (
            "flash_attention_varlen",
            Options(1.0, cu_seqlens_q=torch.zeros(2), max_seqlen_q=256, max_seqlen_k=256),
            False,
        ),
        ("scaled_dot_product_attention(attn_mask=)", Options(1.0, mask=torch.ones(1, 1, 1, 1)), False),
    ],
)  # fmt: skip
def test_what_hopper_covers(monkeypatch, name, options, with_max_logits):
    said = ROWS[name].split("|")[2].split(",")[0].strip()
    assert said == what_hopper_covers(monkeypatch, options, with_max_logits)


def test_hopper_returns_no_max_logits_under_a_softcap(monkeypatch):
    assert "not with `return_max_logits`" in ROWS["softcap"]
    assert what_hopper_covers(monkeypatch, Options(1.0, softcap=10.0), with_max_logits=True) == "no"


@pytest.mark.parametrize("name", SDPA)
def test_options_of_scaled_dot_product_attention(name):
    q, k, v = torch.randn(3, 1, 2, 4, 16)
    found = is_there(lambda: scaled_dot_product_attention(q, k, v, **{name: SDPA[name]}))
    assert_said(f"scaled_dot_product_attention({name}=)", found)


@pytest.mark.parametrize("name", SELF_ATTENTION)
def test_options_of_self_attention(name):
    found = is_there(lambda: SelfAttention(32, 2, **{name: SELF_ATTENTION[name]})(torch.randn(1, 4, 32)))
    assert_said(f"SelfAttention({name}=)", found)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("flash_attention_varlen", hasattr(attention, "flash_attention_varlen")),
        ("SelfAttention.new_cache", hasattr(SelfAttention, "new_cache")),
        ("Muon.metrics", hasattr(Muon, "metrics")),
        ("muon.QKClip", hasattr(muon, "QKClip")),
        ("QKClip.metrics", hasattr(muon.QKClip, "metrics")),
    ],
)
def test_what_may_be_imported(name, found):
    assert_said(name, found)


def test_every_option_has_a_row():
    options = set(inspect.signature(flash_attention).parameters) - {"q", "k", "v", "backend"}
    assert options == set(FLASH_ATTENTION)
    options = set(inspect.signature(Muon).parameters) - set(inspect.signature(torch.optim.Muon).parameters)
    assert options - {"betas", "adamw_eps"} == set(MUON)
    assert {*FLASH_ATTENTION, *MUON} <= set(ROWS)
