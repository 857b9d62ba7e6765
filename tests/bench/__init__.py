"""Figures, each printed by a program of its own: `python -m tests.bench.bench_gateway`, or `make bench` for all.

A bench that is told to stop (SIGTERM) leaves as by Ctrl-C: API servers, databases and labs that it started go with it.
"""

import signal
import threading

if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGTERM, signal.default_int_handler)
