"""Stands in for a pager: prints every notification that Alertmanager sends, one line each."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Receiver(BaseHTTPRequestHandler):
    """Prints what is posted: where to, whether it fires or is resolved, and each alert's summary."""

    def do_POST(self) -> None:
        """One notification."""
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        summaries = "; ".join(alert["annotations"].get("summary", "") for alert in told["alerts"])
        print(f"{self.path[1:]}: {told['status']}: {summaries}", flush=True)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Nothing beside the notifications."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("", int(sys.argv[1])), Receiver)
    print(f"listening on port {server.server_port}", flush=True)
    server.serve_forever()
