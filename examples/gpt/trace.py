"""What ran during a profile: a trace of torch.profiler, read as work that somebody asked for.

A trace (https://docs.pytorch.org/docs/stable/profiler.html) is a list of intervals. On the host they nest: an operator
calls others. On a GPU every kernel carries the number of the call that launched it, and the call lies inside the
operator that made it. So time on the device goes to the innermost operator around the launch; on a CPU an operator's
time is its interval without those of the operators that it calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

HOST = {"cpu_op", "user_annotation"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


@dataclass(eq=False)
class Call:
    """An operator's interval on the host, in microseconds, and the shapes and types of its arguments."""

    name: str
    start: float
    end: float
    shapes: list[list[int]]
    types: list[str]
    number: int | None  # the profiler's
    parent: Call | None
    inside: list[Call] = field(default_factory=list)

    def chain(self) -> Iterator[Call]:
        """The call, the one that it was made by, and so on."""
        call: Call | None = self
        while call is not None:
            yield call
            call = call.parent


@dataclass(frozen=True)
class Work:
    microseconds: float
    call: Call | None  # the innermost around it
    kernel: str | None  # its name on the device; None on a CPU


def read(events: list[dict[str, Any]]) -> list[Work]:
    """All work of a trace: of the GPU if there is any, of the CPU otherwise."""
    spans = [event for event in events if event.get("ph") == "X"]
    calls, launches = nest([event for event in spans if event["cat"] in HOST | LAUNCHES])
    on_device = [event for event in spans if event["cat"] in DEVICE]
    if on_device:
        by_number = {call.number: call for call in calls if call.number is not None}
        return [
            Work(event["dur"], launched_in(event["args"], launches, by_number), event["name"]) for event in on_device
        ]
    return [Work(call.end - call.start - sum(c.end - c.start for c in call.inside), call, None) for call in calls]


def launched_in(args: dict[str, Any], launches: dict[int, Call | None], by_number: dict[int, Call]) -> Call | None:
    """The call around a kernel's launch; where no launch is in the trace, the one that the profiler itself noted."""
    return launches.get(args["correlation"]) or by_number.get(args.get("External id", -1))


def nest(spans: list[dict[str, Any]]) -> tuple[list[Call], dict[int, Call | None]]:
    """The calls, and by the number of each launch the call around it."""
    calls: list[Call] = []
    launches: dict[int, Call | None] = {}
    threads: dict[Any, Call | None] = {}  # the innermost call that is open
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        around = threads.get(event["tid"])
        while around is not None and around.end <= event["ts"]:
            around = around.parent
        if event["cat"] in LAUNCHES:
            launches[event["args"]["correlation"]] = around
            threads[event["tid"]] = around
            continue
        args = event["args"]
        shapes, types = args.get("Input Dims", []), args.get("Input type", [])
        end, number = event["ts"] + event["dur"], args.get("External id")
        call = Call(event["name"], event["ts"], end, shapes, types, number, around)
        if around is not None:
            around.inside.append(call)
        threads[event["tid"]] = call
        calls.append(call)
    return calls, launches
