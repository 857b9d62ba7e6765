"""The program of every container in the life-cycle suite: an HTTP server that tells a collector what happens to it.

Standard library only, one file: it is passed to `python3 -c` in whatever image has Python. Environment: NAME, PORT,
COLLECTOR (host of UDP port 9999), TERM_DELAY (seconds from SIGTERM to exit), LISTEN_AFTER, READY.
With NAME=collector it is the collector: it prints what it hears.
"""

import http.server
import json
import os
import signal
import socket
import threading
import time
import urllib.parse

NAME, POD, PORT = os.environ.get("NAME", "?"), os.environ.get("POD_NAME", ""), int(os.environ.get("PORT", "8000"))
UDP = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
STATE = {"ready": os.environ.get("READY", "1") == "1"}


def tell(event, **details):
    message = json.dumps({"time": time.time(), "pod": POD, "container": NAME, "event": event, **details})
    print(message, flush=True)
    if "COLLECTOR" in os.environ:
        UDP.sendto(message.encode(), (os.environ["COLLECTOR"], 9999))


def leave(code):
    tell("exit", code=code)
    os._exit(code)


def on_term(*_):
    tell("SIGTERM")
    threading.Timer(float(os.environ.get("TERM_DELAY", "0")), leave, [0]).start()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *_):
        pass

    def reply(self, code):
        try:
            self.send_response(code)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")
        except OSError:
            tell("reply-failed", path=self.path)

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if url.path == "/ready":
            self.reply(200 if STATE["ready"] else 503)
        elif url.path == "/set":
            STATE["ready"] = query["ready"] == "1"
            tell("set", ready=STATE["ready"])
            self.reply(200)
        elif url.path == "/exit":
            leave(int(query.get("code", 1)))
        elif url.path == "/drain":
            self.drain(float(query.get("delay", 0)), int(query.get("code", 200)))
        else:
            self.reply(200)

    def drain(self, delay, code):
        tell("drain-begin", agent=self.headers.get("User-Agent"), token=self.headers.get("X-Token"))
        end = time.time() + delay
        self.connection.setblocking(False)
        while time.time() < end:
            time.sleep(0.05)
            try:
                if self.connection.recv(1, socket.MSG_PEEK) == b"":
                    tell("drain-client-gone")
                    self.close_connection = True
                    return
            except BlockingIOError:
                pass
        self.connection.setblocking(True)
        tell("drain-end")
        self.reply(code)


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True


def main():
    signal.signal(signal.SIGTERM, on_term)
    if NAME == "collector":
        UDP.bind(("", 9999))
        while True:
            print(UDP.recv(65536).decode(), flush=True)
    tell("start")
    time.sleep(float(os.environ.get("LISTEN_AFTER", "0")))
    tell("listen")
    Server(("", PORT), Handler).serve_forever()


main()
