"""What only a real kubelet can show: collected by `python -m tests.kubelet` alone, which makes the lab for it."""

import os

collect_ignore_glob = [] if os.environ.get("SHOAL_LIFECYCLE_LAB") else ["test_*.py"]
