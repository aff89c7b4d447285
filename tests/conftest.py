"""One thread a test process: tests run side by side, and OpenMP threads that spin on a busy core crawl."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported, and by child processes
