"""Compiles the Hopper backward for Hopper, which needs no GPU: bulk copies, wgmma and vector atomics."""

import pytest
from helpers.sm90 import run_uninterpreted

SCRIPT = """
import triton.language as tl
from helpers.sm90 import compile_kernel, loops_with_products, waits_first
from triton.experimental.gluon.language import NVMMASharedLayout

from attention.kernels import hopper_backward_careful, hopper_backward_ends, hopper_backward_kernel
from attention.kernels.hopper_backward import SOFTCAP_TILES, TILES

EXPECTED = ("cp.async.bulk.tensor", "wgmma.mma_async", "setmaxnreg", ".add.v4.f32")


def desc(dtype, *block):
    layout = NVMMASharedLayout.get_default_for(list(block), tl.float32 if dtype == "fp32" else tl.float16)
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


def check(width, tile, dtype, left, right, packed=False, softcap=False):
    kernel = hopper_backward_kernel.grad_kernel
    signature = dict.fromkeys(kernel.arg_names, "i32") | {"scale": "fp32", "dq_ptr": "*fp32", "redo_ptr": "*i32"}
    signature |= dict.fromkeys(("q_desc", "do_desc"), desc(dtype, 1, 1, tile.block_m, width))
    signature |= dict.fromkeys(("k_desc", "v_desc", "dk_desc", "dv_desc"), desc(dtype, 1, 1, tile.block_n, width))
    signature |= dict.fromkeys(("lse_desc", "delta_desc"), desc("fp32", 1, tile.block_m))
    constants = {"D": width, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STAGES": tile.stages}
    constants |= {"WIDTH": width, "BOUND_LEFT": left, "BOUND_RIGHT": right}
    pointers = {"dk_ptr": "*" + dtype, "dv_ptr": "*" + dtype, "tasks_ptr": "*i32"}
    if packed:
        signature |= pointers
    else:
        constants |= dict.fromkeys(pointers)
    if softcap:
        signature |= {"softcap": "fp32"}
    else:
        constants |= {"softcap": None}
    aligned = [name for name in ("dq_ptr", *pointers) if name not in constants]
    report = compile_kernel(kernel, signature, constants, aligned, num_warps=8, launch_pdl=True)
    faults = [instruction for instruction in EXPECTED if instruction not in report.ptx]
    faults += ["doesn't wait first"] * (not waits_first(report.ptx))
    # What is kept over the loop may wait in memory, which costs nothing, and newer assemblers do so.
    (loop,) = loops_with_products(report.cubin)
    local = sum("LDL" in instruction or "STL" in instruction for instruction in loop)
    faults += [f"spills {report.spilled_bytes} bytes, {local} times in the loop"] * (
        report.spilled_bytes > (352 if packed or softcap else 128) or local > 40
    )
    variant = f"left={left} right={right} packed={packed} softcap={softcap}:"
    print(width, dtype, variant, faults + report.warnings or "ok")


def check_repair(width, with_options):
    kernel = hopper_backward_careful.repair_kernel
    signature = dict.fromkeys(kernel.arg_names, "i32") | {"scale": "fp32", "redo_ptr": "*i32"}
    signature |= dict.fromkeys(("q_rows", "k_rows", "v_rows", "do_rows"), ("*bf16", "i32", "i32", "i32"))
    signature |= dict.fromkeys(("dq_ptr", "dk_ptr", "dv_ptr"), "*bf16") | {"lse_ptr": "*fp32", "delta_ptr": "*fp32"}
    constants = {"D": width, "BLOCK_D": width, "BOUND_LEFT": True, "BOUND_RIGHT": True}
    if with_options:
        signature |= dict.fromkeys(("cu_q_ptr", "cu_k_ptr"), "*i32") | {"softcap": "fp32"}
    else:
        constants |= dict.fromkeys(("cu_q_ptr", "cu_k_ptr", "softcap"))
    aligned = [name for name in signature if name.endswith("_ptr") and name not in constants]
    report = compile_kernel(kernel, signature, constants, aligned)
    print(width, "repair:", "ok" if waits_first(report.ptx) else "too early")


def check_ends(width, tile, packed):
    numbers = dict.fromkeys(("lse_ptr", "unit_lse_ptr", "padded_delta_ptr", "delta_ptr", "sums_ptr"), "*fp32")
    numbers |= dict.fromkeys(("redo_ptr", "tasks_ptr", "cu_q_ptr", "cu_k_ptr"), "*i32") | {"scale": "fp32"}
    numbers |= dict.fromkeys(("out_rows", "do_rows"), ("*bf16", "i32", "i32", "i32")) | {"grads": ("*bf16",) * 3}
    constants = {"D": width, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_D": width, "dlse_ptr": None}
    if not packed:
        constants |= dict.fromkeys(("redo_ptr", "tasks_ptr", "cu_q_ptr", "cu_k_ptr"))
    for kernel, dq in ((hopper_backward_ends.prepare_kernel, "*fp32"), (hopper_backward_ends.finish_kernel, "*bf16")):
        names = kernel.arg_names
        signature = {name: (numbers | {"dq_ptr": dq}).get(name, "i32") for name in names}
        known = {name: value for name, value in constants.items() if name in names}
        aligned = [name for name in names if name.endswith("_ptr") and name not in known]
        report = compile_kernel(kernel, signature, known, aligned)
        assert report.spilled_bytes == 0
        assert ".v4.b32" in report.ptx
    print(width, "ends:", "ok" if waits_first(report.ptx) else "too early")  # of the last of both


for width, tile in TILES.items():
    check_repair(width, width == 128)
    check_ends(width, tile, width != 64)
    for dtype, left, right in (("bf16", False, True), ("bf16", False, False), ("fp16", True, True)):
        check(width, tile, dtype, left, right)
    check(width, tile, "bf16", False, True, packed=True)
    check(width, SOFTCAP_TILES[width], "bf16", False, True, softcap=True)
    check(width, SOFTCAP_TILES[width], "fp16", True, True, packed=True, softcap=True)
"""


def test_the_backward_compiles_for_hopper():
    pytest.importorskip("triton", reason="kernels need triton, which is for Linux only")
    lines = run_uninterpreted(SCRIPT)
    assert len(lines) == 24
    assert [line for line in lines if not line.endswith(" ok")] == []
