"""orthogonalize() is U p(S) Vᵀ: both methods, both backends, against the float64 singular value decomposition."""

import subprocess
import sys

import pytest
import torch
from helpers.newton_schulz import SPECTRA, error, plain_newton_schulz, spectrum, truth
from hypothesis import example, given, settings
from hypothesis import strategies as st

from muon import PRESETS, orthogonalize
from muon.newton_schulz import TorchOperations, gram_iteration, iterate, operations, pick_iteration, uses_triton
from muon.polynomials import KELLER_JORDAN, schedule

FLOOR = 1e-6


def allowed(G, expected, steps, dtype):
    """Twice the error of plain torch in the same precision, plus the floor."""
    return 2 * error(plain_newton_schulz(G, steps, dtype), expected) + FLOOR


@settings(max_examples=120)
@given(
    batch=st.integers(1, 4),
    rows=st.integers(1, 90),
    cols=st.integers(1, 90),
    kind=st.sampled_from(SPECTRA),
    preset=st.sampled_from(sorted(PRESETS)),
    ns_steps=st.integers(0, 7),
    exponent=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
@example(2, 90, 30, "log-spaced", "polar_express", 5, 30, torch.float32, 0)
@example(2, 30, 90, "log-spaced", "polar_express", 5, -30, torch.bfloat16, 0)
def test_torch_backend_is_the_polynomial_of_the_singular_values(
    batch, rows, cols, kind, preset, ns_steps, exponent, dtype, seed
):
    generator = torch.Generator().manual_seed(seed)
    G = (spectrum(kind, batch, rows, cols, generator) * 10.0**exponent).to(dtype)
    expected = truth(G, preset, ns_steps)
    result = orthogonalize(G, preset, ns_steps, backend="torch")
    assert result.shape == G.shape and result.dtype == dtype
    # The iteration runs in at least float32; then the result is rounded once to the dtype of G.
    compute = torch.promote_types(dtype, torch.float32)
    rounding = error(expected.to(dtype), expected)
    assert error(result, expected) <= allowed(G.double(), expected, schedule(preset, ns_steps), compute) + rounding


@settings(max_examples=40)
@given(
    rows=st.integers(1, 90),
    cols=st.integers(1, 90),
    kind=st.sampled_from(SPECTRA),
    preset=st.sampled_from(sorted(PRESETS)),
    seed=st.integers(0, 2**31),
)
def test_gram_agrees_with_the_polynomial_in_float64(rows, cols, kind, preset, seed):
    G = spectrum(kind, 2, rows, cols, torch.Generator().manual_seed(seed))
    # Iterating on X Xᵀ squares the condition: rounding grows by the growth of the smallest singular values, no more.
    assert error(orthogonalize(G, preset, method="gram"), truth(G, preset)) <= 1e-10


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", SPECTRA)
def test_the_plain_iteration_in_float64_is_the_truth_too(kind, preset):
    """So tests/gpu may use it, where a singular value decomposition takes longer than all the rest."""
    G = spectrum(kind, 2, 40, 90, torch.Generator().manual_seed(0)) * 1e20
    assert error(plain_newton_schulz(G, schedule(preset, 5), torch.float64), truth(G, preset)) < 1e-11


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("kind", SPECTRA)
def test_gram_in_float16_is_no_worse_than_torch_in_bfloat16(kind, preset):
    G = spectrum(kind, 1, 64, 160, torch.Generator().manual_seed(0)).float()
    expected = truth(G, preset)
    result = orthogonalize(G, preset, method="gram", dtype=torch.float16, backend="torch")
    assert error(result, expected) <= error(plain_newton_schulz(G, schedule(preset, 5), torch.bfloat16), expected)


@pytest.mark.parametrize("preset", ["keller_jordan", "quintic", "polar_express"])
@pytest.mark.parametrize("rank", [1, 8])
def test_gram_in_float16_restarts_before_low_rank_costs_it_more_than_torch(rank, preset):
    """A Gram matrix that served three of Quintic's steps had up to three times the error."""
    generator = torch.Generator().manual_seed(0)
    G = torch.randn(64, rank, generator=generator) @ torch.randn(rank, 160, generator=generator)
    expected = truth(G, preset)
    result = orthogonalize(G, preset, method="gram", dtype=torch.float16, backend="torch")
    assert error(result, expected) <= error(plain_newton_schulz(G[None], schedule(preset, 5), torch.float16), expected)


@settings(max_examples=16)
@given(
    batch=st.integers(1, 3),
    rows=st.integers(1, 150),
    cols=st.integers(1, 80),
    kind=st.sampled_from(SPECTRA),
    preset=st.sampled_from(["keller_jordan", "polar_express"]),
    method=st.sampled_from(["standard", "gram", "small"]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 2**31),
)
@example(2, 150, 33, "gaussian", "keller_jordan", "standard", torch.float32, 0)
@example(1, 20, 80, "log-spaced", "polar_express", "gram", torch.float16, 0)
@example(2, 65, 130, "log-spaced", "polar_express", "small", torch.float16, 0)
@example(2, 130, 33, "low rank", "keller_jordan", "small", torch.float16, 0)
@pytest.mark.usefixtures("uninitialized_memory_is_nan")
def test_triton_backend_is_the_polynomial_of_the_singular_values(batch, rows, cols, kind, preset, method, dtype, seed):
    pytest.importorskip("triton", reason="the Triton backend needs triton, which is for Linux only")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    G = spectrum(kind, batch, rows, cols, torch.Generator().manual_seed(seed)).float().to(device)
    expected = truth(G, preset)
    twin_method = "gram" if method == "small" else method
    with pytest.MonkeyPatch.context() as patch:
        # The kernel for small matrices takes over the Gram iteration in float16.
        patch.setattr("muon.newton_schulz.LARGEST_SMALL_SIDE", 128 if method == "small" else 0)
        result = orthogonalize(G, preset, method=twin_method, dtype=dtype, backend="triton")
    twin = orthogonalize(G, preset, method=twin_method, dtype=dtype, backend="torch")
    assert error(result, expected) <= 2 * error(twin, expected) + FLOOR


@pytest.mark.parametrize("n", [20, 130])
def test_a_normalised_matrix_is_not_normalised_again(n):
    """Every iteration takes X as it is: zero, or shorter than 1 because its norm was under eps."""
    pytest.importorskip("triton", reason="the Triton backend needs triton, which is for Linux only")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    X = torch.zeros(2, 144 if n == 130 else 32, 160, dtype=torch.float16, device=device)
    X[1, :n, :150] = spectrum("gaussian", 1, n, 150, torch.Generator().manual_seed(0))[0] / 150
    steps = schedule("keller_jordan", 3)
    names = ("small", "gram") if n == 20 else ("gram", "standard")
    results = [iterate(X, steps, name, operations(use_triton=True)) for name in names]
    expected = gram_iteration(X.double(), steps, TorchOperations())
    for result in results:
        assert result[0].count_nonzero() == 0
        assert error(result[1], expected[1]) < 5e-3


@pytest.mark.parametrize("layout", ["rows expanded", "batch expanded", "sliced", "transposed"])
def test_small_matrices_of_any_strides(layout):
    """The result once had the strides of G, so that rows of an expanded G overwrote each other."""
    pytest.importorskip("triton", reason="the Triton backend needs triton, which is for Linux only")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    G = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0)).to(device)
    if layout == "rows expanded":
        G = G[:, :1].expand(2, 32, 64)
    elif layout == "batch expanded":
        G = G[:1].expand(2, 32, 64)
    elif layout == "sliced":
        G = G[:, :, 16:48]
    else:
        G = G.mT
    result = orthogonalize(G, backend="triton", dtype=torch.float16)
    twin = orthogonalize(G, backend="torch", method="gram", dtype=torch.float16)
    expected = truth(G, KELLER_JORDAN)
    assert error(result, expected) <= 2 * error(twin, expected) + FLOOR
    assert len({result[0, i].data_ptr() for i in range(len(result[0]))}) == len(result[0])


def test_the_triton_backend_leaves_what_descriptors_cannot_read_alone():
    G = torch.randn(30, 140).mT
    before = G.clone()
    orthogonalize(G, ns_steps=1, method="standard", backend="triton")
    assert torch.equal(G, before)


def test_what_auto_means():
    steps = schedule("keller_jordan", 5)

    def picked(n, m, dtype=None, use_triton=True, method="auto"):
        return pick_iteration(method, steps, n, m, dtype, use_triton)

    assert picked(64, 768) == picked(128, 128) == "small"
    assert picked(129, 129) == picked(768, 768) == "standard"
    assert picked(768, 3072) == picked(1408, 2048) == "gram"
    assert picked(64, 768, use_triton=False) == picked(768, 3072, use_triton=False) == "standard"
    assert picked(64, 768, torch.float32) == picked(64, 768, method="gram", use_triton=False) == "gram"
    assert picked(64, 768, method="standard") == "standard"


@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(0, 4), max_size=2),
    rows=st.integers(0, 40),
    cols=st.integers(0, 40),
    layout=st.sampled_from(["contiguous", "transposed", "strided", "expanded"]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_stride_and_dtype(shape, rows, cols, layout, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    G = torch.randn(*shape, rows, cols, generator=generator, dtype=torch.float64).to(dtype)
    if layout == "transposed":
        G = G.mT.contiguous().mT
    elif layout == "strided":
        G = torch.stack([G, torch.full_like(G, float("nan"))], -1)[..., 0]
    elif layout == "expanded":
        G = G.unsqueeze(0).expand(3, *G.shape)
    before = G.clone()
    result = orthogonalize(G)
    assert result.shape == G.shape and result.dtype == dtype
    assert torch.equal(G, before)
    if G.numel():
        expected, steps = truth(G, KELLER_JORDAN), schedule(KELLER_JORDAN, 5)
        rounding = error(expected.to(dtype), expected)
        compute = torch.promote_types(dtype, torch.float32)
        assert error(result, expected) <= allowed(G.double(), expected, steps, compute) + rounding


@settings(max_examples=25)
@given(rows=st.integers(1, 40), cols=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_orthogonal_equivariance(rows, cols, seed):
    generator = torch.Generator().manual_seed(seed)
    G = torch.randn(rows, cols, generator=generator, dtype=torch.float64)
    Q = torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64)).Q
    P = torch.linalg.qr(torch.randn(cols, cols, generator=generator, dtype=torch.float64)).Q
    assert error(orthogonalize(Q @ G @ P), Q @ orthogonalize(G) @ P) <= 1e-12
    assert error(orthogonalize(G.mT), orthogonalize(G).mT) <= 1e-12


@settings(max_examples=25)
@given(exponent=st.integers(-120, 120), seed=st.integers(0, 2**31))
def test_scale_invariance(exponent, seed):
    G = torch.randn(17, 29, generator=torch.Generator().manual_seed(seed))
    # Powers of two are exact, so the result has to be the same to the bit.
    assert torch.equal(orthogonalize(G * 2.0**exponent), orthogonalize(G))


@pytest.mark.parametrize("magnitude", [1e-30, 1e30, 3e38])
def test_extreme_magnitudes(magnitude):
    G = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    G = G / G.abs().max() * magnitude
    expected = truth(G, KELLER_JORDAN)
    assert error(orthogonalize(G), expected) <= allowed(G, expected, schedule(KELLER_JORDAN, 5), torch.float32)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_bad_matrix_spoils_itself_only(bad, backend, method, dtype):
    if backend == "triton":
        pytest.importorskip("triton", reason="the Triton backend needs triton, which is for Linux only")
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    G = torch.randn(3, 20, 12, generator=torch.Generator().manual_seed(0)).to(device)
    clean = orthogonalize(G, method=method, backend=backend, dtype=dtype)
    G[1, 3, 4] = bad
    result = orthogonalize(G, method=method, backend=backend, dtype=dtype)
    assert torch.equal(result[[0, 2]], clean[[0, 2]])
    assert result[1].isnan().all()


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("eps", [1e-7, 0.0])
def test_zeros_give_zeros(method, dtype, backend, eps):
    if backend == "triton":
        pytest.importorskip("triton", reason="the Triton backend needs triton, which is for Linux only")
    zeros = torch.zeros(2, 5, 7, device="cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")
    assert torch.equal(orthogonalize(zeros, eps=eps, method=method, dtype=dtype, backend=backend), zeros)


@pytest.mark.parametrize(
    ("arguments", "exception", "message"),
    [
        ((torch.zeros(3),), ValueError, r"at least 2 dimensions.*\(3,\)"),
        ((torch.zeros(3, 3, dtype=torch.int32),), TypeError, "torch.int32"),
        ((torch.zeros(3, 3, dtype=torch.complex64),), TypeError, "torch.complex64"),
        ((torch.zeros(3, 3), "nonsense"), ValueError, "'nonsense'.*'keller_jordan'"),
    ],
)
def test_bad_input(arguments, exception, message):
    with pytest.raises(exception, match=message):
        orthogonalize(*arguments)


@pytest.mark.parametrize(
    ("options", "exception", "message"),
    [
        ({"dtype": torch.int32}, TypeError, "dtype should be a real floating dtype but is: torch.int32"),
        ({"dtype": "float32"}, TypeError, "dtype should be a real floating dtype but is: 'float32'"),
        ({"eps": -1.0}, ValueError, "eps should be >= 0 but is: -1.0"),
        ({"eps": float("nan")}, ValueError, "eps should be >= 0 but is: nan"),
        ({"dtype": torch.float64, "backend": "triton"}, ValueError, "has no float64"),
    ],
)
def test_bad_options(options, exception, message):
    if options.get("backend") == "triton":
        pytest.importorskip("triton", reason="the Triton backend needs triton, which is for Linux only")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with pytest.raises(exception, match=message):
        orthogonalize(torch.zeros(3, 3, device=device), **options)


def test_triton_refuses_what_may_have_its_elements_elsewhere():
    pytest.importorskip("triton", reason="the Triton backend needs triton, which is for Linux only")

    class Elsewhere(torch.Tensor):
        pass

    device = "cuda" if torch.cuda.is_available() else "cpu"
    G = torch.randn(3, 3, device=device).as_subclass(Elsewhere)
    with pytest.raises(ValueError, match="needs a plain tensor but G is a: Elsewhere"):
        orthogonalize(G, backend="triton")
    assert not uses_triton("auto", G)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_what_is_to_be_negated_when_read(backend):
    if backend == "triton":
        pytest.importorskip("triton", reason="the Triton backend needs triton, which is for Linux only")
    G = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))
    G = G.to("cuda" if backend == "triton" and torch.cuda.is_available() else "cpu")
    assert torch.equal(orthogonalize(torch._neg_view(G), backend=backend), -orthogonalize(G, backend=backend))


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_autocast_leaves_the_iteration_in_its_dtype(method):
    """Its products were bfloat16, for Gram too, which bfloat16 is too coarse for."""
    G = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))
    expected = orthogonalize(G, method=method)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(orthogonalize(G, method=method), expected)
        assert torch.is_autocast_enabled("cpu")
        assert orthogonalize(G.to("meta")).shape == G.shape  # which autocast doesn't know


def test_the_result_carries_no_gradient():
    assert not orthogonalize(torch.randn(3, 3, requires_grad=True)).requires_grad


@pytest.mark.parametrize("option", ["method", "backend"])
def test_bad_option(option):
    with pytest.raises(ValueError, match=f"{option} should be 'auto'.*'nonsense'"):
        orthogonalize(torch.zeros(3, 3), **{option: "nonsense"})


def test_triton_on_a_cpu_tensor_says_what_it_needs(monkeypatch):
    pytest.importorskip("triton", reason="the Triton backend needs triton, which is for Linux only")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="needs a CUDA tensor but G is on: cpu"):
        orthogonalize(torch.zeros(3, 3), backend="triton")


def test_import_needs_torch_alone_and_touches_no_device():
    program = (
        "import sys; sys.modules['triton'] = None; sys.modules['numpy'] = None\n"
        "import muon, attention, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(muon.orthogonalize(torch.eye(3), 'converged').diagonal().round(decimals=2).tolist())"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[1.0, 1.0, 1.0]" and not done.stderr
