"""The tests' own modules lie beside them; the processes that they start find them too."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[2])]
