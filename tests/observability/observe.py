"""`python -m tests.observability.observe`: the whole chain on loopback, eight workers refused, and what the pager gets.

Prints the notification, and the seconds from the refusals to it, with the shipped scrape, evaluation and group times.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from tests.observability.chain import Chain

TIMEOUT_S = 180.0


def main() -> None:
    """Start everything, refuse eight workers, wait for the pager."""
    with tempfile.TemporaryDirectory() as folder, Chain(Path(folder) / "chain") as chain:
        print(f"Prometheus http://{chain.prometheus}  Alertmanager http://{chain.alertmanager}  node_exporter http://{chain.exporter}")
        print("eight workers of one engine register, are refused, and are killed; waiting for the pager ...", flush=True)
        refused_at = chain.work("hybrid:rejected:8")
        ended_at = time.time()
        told_at, notification = chain.receiver.wait("/page", TIMEOUT_S)
        json.dump(notification, sys.stdout, indent=2)
        told = len(chain.receiver.notifications("/page"))
        print(f"\n\n{told} notification of {len(notification['alerts'])} alert: {notification['commonAnnotations']['summary']}")
        print(f"{ended_at - refused_at:.1f} s until all eight workers were dead")
        print(f"{told_at - refused_at:.1f} s from the refusals to the notification")


if __name__ == "__main__":
    main()
