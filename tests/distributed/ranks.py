"""Runs a function on several processes, with a hard time limit and a clean end."""

import contextlib
import io
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=30)  # of a collective


def run_on_ranks(
    function: Callable[..., Any], ranks: int, *args: Any, seconds: float = 80.0, backend: str = "gloo"
) -> list[Any]:
    """What ``function(rank, *args)`` returns on each rank, or an exception that says what went wrong where.

    Every process is gone afterwards. The others get a moment to end by themselves once one has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        processes = [
            context.Process(target=_rank, args=(function, rank, ranks, folder, args, backend), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + seconds
        while any(process.is_alive() for process in processes):
            if any(process.exitcode for process in processes):
                deadline = min(deadline, time.monotonic() + 10)
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        late = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        files = [Path(folder) / f"result{rank}" for rank in range(ranks)]
        results = [pickle.loads(file.read_bytes()) if file.exists() else ("lost", None) for file in files]
    failed = [f"rank {rank}: {text}" for rank, (state, text) in enumerate(results) if state == "failed"]
    if failed or late or any(state == "lost" for state, _ in results):
        codes = [process.exitcode for process in processes]
        raise RankError("\n".join([f"too late: {late}, exit codes: {codes}", *failed]), codes, late)
    return [value for _, value in results]


class RankError(Exception):
    def __init__(self, text: str, codes: list[int | None], late: list[int]) -> None:
        super().__init__(text)
        self.codes, self.late = codes, late


def _rank(
    function: Callable[..., Any], rank: int, ranks: int, folder: str, args: tuple[Any, ...], backend: str
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    out = Path(folder) / f"result{rank}"
    code = 0
    try:
        dist.init_process_group(
            backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=TIMEOUT
        )
        with contextlib.redirect_stdout(io.StringIO()):
            result = ("done", function(rank, *args))
    except BaseException:
        result, code = ("failed", traceback.format_exc()), 1
    out.write_bytes(pickle.dumps(result))
    with contextlib.suppress(Exception):
        if not code:
            dist.barrier()  # none goes before the others have what they wait for
    os._exit(code)  # without waiting for gloo's threads, whose peers may be gone
