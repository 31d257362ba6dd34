"""A GPT that trains with Muon and FlashAttention."""

import os
import signal
import sys

# How long a thread of torch's waits for the others by spinning before it sleeps, in turns of a loop. The default,
# 300,000, takes the core from whoever else needs it: with one other busy program on two cores a training step took
# 0.6 to 7 s, with this 0.3; on idle cores it is 0.16 s with both. libgomp reads it once, so it precedes `import torch`.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Importing torch takes seconds. Until `cli.run` has the say, Ctrl-C ends a command of ours without a traceback.
if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
