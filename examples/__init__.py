"""A GPT that trains with Muon and FlashAttention."""

import os

# Threads that wait for each other should sleep, not spin: with one other busy program on a two-core machine, a training
# step takes 0.35 s instead of 2 to 7. Torch's thread library reads this once, so it comes before `import torch`.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
