"""Set before any test module is imported."""

import os

# One thread for each process: two pytest workers and the processes of their launches share the machine's cores, and a
# process that is forked from one with a pool of OpenMP threads may crash in its first parallel region
# (tests/distributed/forked.py forks).
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
