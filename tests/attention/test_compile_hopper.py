"""Compiles the Gluon forward for Hopper, which needs no GPU: its instructions, its spills and what its loops do."""

import pytest
from helpers.sm90 import run_uninterpreted

SCRIPT = """
import multiprocessing

import triton.language as tl
from helpers.sm90 import compile_kernel, loops_with_products
from triton.experimental.gluon.language import NVMMASharedLayout

from attention.kernels.hopper_forward import TILES, forward_kernel
from attention.kernels.tiles import padded_widths

EXPECTED = ("cp.async.bulk.tensor", "wgmma.mma_async", "setmaxnreg")
TYPES = {"scale": "fp32", "softcap": "fp32", "lse_ptr": "*fp32", "max_logits_ptr": "*fp32", "sinks_ptr": "*fp32"}
TYPES |= {"cu_q_ptr": "*i32", "cu_k_ptr": "*i32"}
VARLEN = {"cu_q_ptr", "cu_k_ptr"}
OPTIONAL = VARLEN | {"max_logits_ptr", "sinks_ptr", "softcap"}
FULL, CAUSAL, WINDOW = (False, False), (False, True), (True, True)
CASES = [
    ("bf16", 64, 64, FULL, set()),
    ("fp16", 64, 64, CAUSAL, {"max_logits_ptr"}),
    ("bf16", 64, 64, WINDOW, VARLEN | {"sinks_ptr"}),
    ("fp16", 128, 128, FULL, set()),
    ("bf16", 128, 128, CAUSAL, set()),
    ("fp16", 128, 128, WINDOW, {"sinks_ptr", "max_logits_ptr"}),
    ("bf16", 128, 128, FULL, {"softcap"}),
    ("fp16", 256, 256, FULL, set()),
    ("bf16", 256, 256, CAUSAL, VARLEN | {"sinks_ptr", "softcap"}),
    ("fp16", 256, 256, WINDOW, set()),
    ("bf16", 192, 128, CAUSAL, set()),
]


def desc(dtype, rows, width):
    layout = NVMMASharedLayout.get_default_for([1, 1, rows, width], tl.float16)
    return f"tensordesc<{dtype}[1, 1, {rows}, {width}],{layout!r}>"


def compile_case(dtype, width, width_v, bounds, on):
    block_d, block_dv = (max(64, block) for block in padded_widths(width, width_v))
    tile = TILES[max(block_d, block_dv)]
    rows = (f"*{dtype}", "i32", "i32", "i32")
    signature = dict.fromkeys(forward_kernel.arg_names, "i32") | TYPES | {"out_ptr": f"*{dtype}"}
    signature |= dict.fromkeys(("q_rows", "k_rows", "v_rows"), rows)
    signature |= {"q_desc": desc(dtype, 64, block_d), "out_desc": desc(dtype, 64, block_dv)}
    signature |= {"k_desc": desc(dtype, tile.block_n, block_d), "v_desc": desc(dtype, tile.block_n, block_dv)}
    constants = {"D": width, "DV": width_v, "GROUPS": tile.groups, "STAGES": tile.stages, "REGISTERS": tile.registers}
    constants |= {"TAKE_TURNS": tile.take_turns, "BOUND_LEFT": bounds[0], "BOUND_RIGHT": bounds[1]}
    constants |= {"OUT_OVER_Q": min(block_d, block_dv) == 256} | dict.fromkeys(OPTIONAL - on)
    pointers = [name for name in signature if name.endswith("_ptr") and name not in constants]
    return tile, compile_kernel(forward_kernel, signature, constants, pointers, num_warps=4)


def check(case):
    dtype, width, width_v, bounds, on = case
    tile, report = compile_case(*case)
    faults = [instruction for instruction in EXPECTED if instruction not in report.ptx] + report.warnings
    # Tile numbers that wait in memory between two tiles of queries; stores and loads are both counted.
    if report.spilled_bytes > (512 if any(bounds) or on else 64):
        faults.append(f"spills {report.spilled_bytes} bytes")
    # Each group has a loop over the keys that all its queries see, and one or two, masked, beside it.
    loops = loops_with_products(report.cubin)
    if len(loops) != tile.groups * (3 if bounds[0] else 2):
        faults.append(f"{len(loops)} loops with products")
    for loop in loops:
        local = [one for one in loop if "LDL" in one or "STL" in one]
        # With two limits a row, the masked loops read a number or two again, in some 700 instructions.
        if len(local) > (2 if bounds[0] else 0) or any("STL" in one for one in local):
            faults.append(f"a loop of {len(loop)} instructions with {local}")
    return f"{dtype} {width} {width_v} {bounds} {sorted(on)}: {faults or 'ok'}"


with multiprocessing.get_context("fork").Pool(2) as pool:
    for line in pool.imap(check, CASES, chunksize=1):
        print(line)
"""


def test_the_forward_compiles_for_hopper():
    pytest.importorskip("triton", reason="kernels need triton, which is for Linux only")
    lines = run_uninterpreted(SCRIPT)
    assert len(lines) == 11
    assert [line for line in lines if not line.endswith(": ok")] == []
