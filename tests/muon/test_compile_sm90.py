"""Compiles every kernel for Hopper, which needs no GPU: no spills, bulk copies and wgmma where they belong."""

import pytest
from helpers.sm90 import run_uninterpreted

SCRIPT = """
import torch
import triton.language as tl
from helpers.sm90 import compile_kernel
from muon.kernels import hopper, hopper_small, products, small, stages
from triton.experimental.gluon.language import NVMMASharedLayout


def check(what, kernel, signature, constants, aligned, expected, **options):
    report = compile_kernel(kernel, signature, constants, aligned, **options)
    missing = [instruction for instruction in expected if instruction not in report.ptx]
    faults = missing + [f"spills {report.spilled_bytes} bytes"] * (report.spilled_bytes > 0) + report.warnings
    print(what, faults or "ok")


def desc(dtype, rows, cols):
    return f"tensordesc<{dtype}[1, {rows}, {cols}]>"


for dtype, torch_dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
    block, _, block_k, num_warps, num_stages = products._symmetric_config(torch_dtype)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    expected = ["cp.async.bulk.tensor"] + (["wgmma.mma_async"] if dtype != "fp32" else [])
    square = desc(dtype, block, block)
    for terms, symmetrize in ((0, False), (1, False), (1, True), (2, True)):
        signature = {"a_desc": desc(dtype, block, block_k), "b_desc": desc(dtype, block, block_k)}
        signature |= dict.fromkeys(("c_desc", "d_desc", "out_desc"), square)
        signature |= dict.fromkeys(("alpha", "beta", "gamma"), "fp32") | {"n": "i32", "k": "i32"}
        constants = {"TERMS": terms, "SYMMETRIZE": symmetrize, "BLOCK_N": block, "BLOCK_K": block_k, "GROUP": 8}
        constants["UPCAST"] = False
        what = f"symmetric {dtype} {terms} terms:"
        check(what, products.symmetric_product_kernel, signature, constants, ["n", "k"], expected, **options)
    for n in (768, 4096):
        block_n, block_m, block_k, num_warps, num_stages = products._update_config(torch_dtype, n)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        tile = desc(dtype, block_n, block_m)
        signature = {"b_desc": desc(dtype, block_n, block_k), "x_desc": desc(dtype, block_k, block_m)}
        signature |= {"x_tile_desc": tile, "out_desc": tile, "a": "fp32", "n": "i32", "m": "i32"}
        constants = {"BLOCK_N": block_n, "BLOCK_M": block_m, "BLOCK_K": block_k, "GROUP": 8, "UPCAST": False}
        check(f"update {dtype} {n}:", products.update_kernel, signature, constants, ["n", "m"], expected, **options)

def shared(dtype, rows, cols):
    layout = NVMMASharedLayout.get_default_for([1, rows, cols], tl.float16)
    return f"tensordesc<{dtype}[1, {rows}, {cols}],{layout!r}>"


for dtype in ("fp16", "bf16"):
    for symmetric, terms, symmetrize in ((1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 2, 1), (0, 1, 0)):
        b_shape = (128, 64) if symmetric else (64, 128)
        signature = {"a_desc": shared(dtype, 128, 64), "b_desc": shared(dtype, *b_shape)}
        signature |= dict.fromkeys(("c_desc", "d_desc", "out_desc"), shared(dtype, 128, 128))
        signature |= dict.fromkeys(("alpha", "beta", "gamma"), "fp32")
        signature |= dict.fromkeys(("tiles", "rows", "cols", "depth"), "i32")
        constants = {"TERMS": terms, "SYMMETRIC": bool(symmetric), "SYMMETRIZE": bool(symmetrize)}
        expected = ["cp.async.bulk.tensor", "wgmma.mma_async", "setmaxnreg"]
        what = f"hopper {dtype} {constants}:"
        check(what, hopper.product_kernel, signature, constants, [], expected, num_warps=4)

for dtype, normalize in (("bf16", True), ("fp16", False)):
    for tall in (False, True):
        tile = shared(dtype, *((128, 64) if tall else (64, 128)))
        signature = {"g_desc": tile, "out_desc": tile, "coefficients": ("fp32",) * 15, "eps": "fp32"}
        constants = {"IS_TALL": tall, "NORMALIZE": normalize, "STEPS": 5, "TILES": 6}
        constants["RESTARTS"] = 0b01001 if normalize else 0b10101
        what = f"hopper small {dtype} tall={tall}:"
        expected = ["cp.async.bulk.tensor", "wgmma.mma_async"]
        check(what, hopper_small.small_kernel, signature, constants, [], expected, num_warps=4)

for block_n, num_warps in small.NUM_WARPS.items():
    for tall in (False, True):
        tile = desc("bf16", small.BLOCK_M, block_n) if tall else desc("bf16", block_n, small.BLOCK_M)
        signature = {"g_desc": tile, "out_desc": tile, "coefficients": ("fp32",) * 15, "m": "i32", "eps": "fp32"}
        constants = {"IS_TALL": tall, "NORMALIZE": True, "STEPS": 5, "RESTARTS": 0b10101}
        constants |= {"COMPUTE_DTYPE": tl.float16, "BLOCK_N": block_n, "BLOCK_M": small.BLOCK_M}
        expected = ["cp.async.bulk.tensor", "wgmma.mma_async" if block_n >= 64 else "mma.sync"]
        what = f"small {block_n} tall={tall}:"
        check(what, small.small_kernel, signature, constants, ["m"], expected, num_warps=num_warps)

for dtype in (tl.float32, tl.bfloat16):
    for aligned in (True, False):
        what = f"{dtype} aligned={aligned}:"
        vector = ["ld.global.v4.b32"] if aligned else []
        sizes = ["n", "m", "size", "stride_xb", "stride_xn"] if aligned else []
        pointers = {"table_ptr": "*i64", "scalar_ptr": "*fp32"}
        flags = {"NESTEROV": True, "ALIGNED": aligned, "GRAD_DTYPE": dtype, "MOMENTUM_DTYPE": dtype}
        momentum = pointers | {"partial_ptr": "*fp32", "sign": "fp32", "size": "i32", "chunks": "i32"}
        constants = flags | {"BLOCK": stages.CHUNK, "HAS_GRAD": True}
        none = {"update_ptr": None}
        check("momentum " + what, stages.momentum_kernel, momentum, constants | none, sizes, vector, num_warps=8)
        sends = {name: kind for name, kind in momentum.items() if name != "partial_ptr"} | {"update_ptr": "*bf16"}
        none = {"partial_ptr": None}
        whole = [*sizes, "update_ptr"]
        check("sent " + what, stages.momentum_kernel, sends, constants | none, whole, vector, num_warps=8)
        places = {"n": "i32", "m": "i32", "stride_xb": "i32", "stride_xn": "i32"}
        pack = pointers | {"norm_ptr": "*fp32", "x_ptr": "*fp16", "sign": "fp32"} | places
        check("pack " + what, stages.pack_kernel, pack, flags | {"TILE": stages.TILE}, [*sizes, "x_ptr"], vector)
        apply = pointers | {"x_ptr": "*fp16", "ratio_ptr": "*fp32"} | places
        for variant in (False, True):
            constants = {"CAUTIOUS": variant, "NEURON_NORM": variant}
            constants |= {"HAS_REMAINDER": variant and dtype == tl.bfloat16}
            constants |= {"ALIGNED": aligned, "PARAM_DTYPE": dtype, "TILE": stages.TILE}
            options = {"num_warps": stages.apply_warps(constants["HAS_REMAINDER"])}
            what_variant = f"apply {variant} " + what
            check(what_variant, stages.apply_kernel, apply, constants, [*sizes, "x_ptr"], vector, **options)

places = {"n": "i32", "m": "i32", "stride_xb": "i32", "stride_xn": "i32"}
turn, wide = {"x_ptr": "*fp16", "out_ptr": "*fp16"} | places, ["ld.global.v4.b32", "st.global.v4.b32"]
check("transpose:", stages.transpose_kernel, turn, {"TILE": stages.TILE}, list(turn), wide)
neuron = {"table_ptr": "*i64", "x_ptr": "*fp16", "squares_ptr": "*fp32", "beta2": "fp32"} | places
check("neuron:", stages.neuron_kernel, neuron, {"TILE": stages.TILE}, [*places, "x_ptr"], ["ld.global.v4.b32"])
neuron = {"table_ptr": "*i64", "squares_ptr": "*fp32", "ratio_ptr": "*fp32", "n": "i32", "m": "i32"}
check("neuron norm:", stages.neuron_norm_kernel, neuron, {"BLOCK": 1024}, ["n", "m"], [])
"""


def test_every_kernel_compiles_for_hopper_without_spills():
    pytest.importorskip("triton", reason="kernels need triton, which is for Linux only")
    lines = run_uninterpreted(SCRIPT)
    assert len(lines) == 63
    assert [line for line in lines if not line.endswith(" ok")] == []
