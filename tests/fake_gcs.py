"""Google Cloud Storage on the loopback interface, as far as TensorFlow's gs:// file system asks.

TensorFlow has no setting for another server. So this is a proxy that answers by itself, with a
certificate of its own, whatever is asked of googleapis.com; the environment says where it is. It is
a process of its own, because TensorFlow holds Python's lock while it waits for some answers.

    python tests/fake_gcs.py FOLDER        # which receives the certificate; ends with its input
"""

import contextlib
import json
import ssl
import subprocess
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_HOSTS = ("www.googleapis.com", "storage.googleapis.com")


@contextlib.contextmanager
def fake_gcs(folder):
    """Runs it; yields the variables of the environment of a process that is to find it.

    Args:
        folder: `pathlib.Path`, receives the certificate.
    """
    process = subprocess.Popen(
        [sys.executable, __file__, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield {
            "https_proxy": f"http://127.0.0.1:{int(process.stdout.readline())}",
            "CURL_CA_BUNDLE": str(folder / "certificate.pem"),
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
            "NO_GCE_CHECK": "true",
        }
    finally:
        process.stdin.close()
        process.wait()


class _Buckets:
    """Objects in memory, {"bucket/name": bytes}, and the keys of resumable uploads.

    Every bucket is there; to one called forbidden nobody has access.
    """

    def __init__(self):
        self.objects, self.generations, self.uploads = {}, {}, []

    def put(self, key, data):
        self.objects[key] = data
        self.generations[key] = self.generations.get(key, 0) + 1

    def details(self, key):
        """What the JSON API says of an object."""
        return {
            "name": key.partition("/")[2],
            "size": str(len(self.objects[key])),
            "generation": str(self.generations[key]),
            "updated": "2026-01-01T00:00:00.000Z",
        }

    def list(self, bucket, prefix="", delimiter="", maxResults="1000", **_):
        """What it says of a folder; all on one page."""
        items, prefixes = [], set()
        for key in sorted(self.objects):
            name = key.removeprefix(f"{bucket}/")
            if name == key or not name.startswith(prefix):
                continue
            rest = name.removeprefix(prefix)
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                items.append(self.details(key))
        return {"items": items[: int(maxResults)], "prefixes": sorted(prefixes)}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    buckets = _Buckets()
    lock = threading.Lock()

    def log_message(self, *args):
        pass

    def do_CONNECT(self):
        self.send_response(200)
        self.end_headers()
        self.connection = self.server.tls.wrap_socket(self.connection, server_side=True)
        self.rfile = self.connection.makefile("rb")
        self.wfile = self.connection.makefile("wb", buffering=0)
        self.close_connection = False

    def _answer(self):
        url = urllib.parse.urlsplit(self.path)
        parts = [urllib.parse.unquote(part) for part in url.path.strip("/").split("/")]
        body = self._body()
        with self.lock:
            status, content, *headers = self._result(
                parts, dict(urllib.parse.parse_qsl(url.query)), body
            )
        if isinstance(content, dict):
            content = json.dumps(content).encode()
        self.send_response(status)
        for name, value in [*headers, ("Content-Length", str(len(content)))]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = _answer

    def _body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _result(self, parts, query, body):
        """(status, body, *headers) of an answer."""
        buckets = self.buckets
        if parts[:2] == ["upload", "storage"]:
            return self._upload(f"{parts[4]}/{query['name']}", query, body)
        if parts[:2] != ["storage", "v1"]:
            return self._part(buckets.objects.get("/".join(parts)))
        bucket, *rest = parts[3:]
        if bucket == "forbidden":
            return 403, {"error": {"message": "no access"}}
        if not rest:
            return 200, {"name": bucket, "location": "local"}
        if len(rest) == 1:
            return 200, buckets.list(bucket, **query)
        key = f"{bucket}/{rest[1]}"
        if key not in buckets.objects:
            return 404, {}
        if self.command == "DELETE":
            del buckets.objects[key]
            return 204, b""
        if "rewriteTo" in rest:
            buckets.put(f"{rest[4]}/{rest[6]}", buckets.objects[key])
            return 200, {"done": True}
        return 200, buckets.details(key)

    def _upload(self, key, query, body):
        if query["uploadType"] == "media":
            self.buckets.put(key, body)
        elif self.command == "POST":
            number = len(self.buckets.uploads)
            self.buckets.uploads.append(key)
            where = f"https://{_HOSTS[0]}{self.path}&session={number}"
            return 200, {}, ("Location", where)
        # Without a body it asks whether the upload is complete.
        elif not self.headers["Content-Range"].startswith("bytes */"):
            self.buckets.put(self.buckets.uploads[int(query["session"])], body)
        return 200, {}

    def _part(self, data):
        if data is None:
            return 404, {}
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        return (206, data[first : last + 1]) if first < len(data) else (416, b"")


def main(folder):
    """Serves until standard input ends; prints the port."""
    names = ",".join(f"DNS:{host}" for host in _HOSTS)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        + ["-nodes", "-days", "2", "-subj", "/CN=fake", "-addext", f"subjectAltName={names}"]
        + ["-keyout", folder / "key.pem", "-out", folder / "certificate.pem"],
        check=True,
        capture_output=True,
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    # Of clients that were killed.
    server.handle_error = lambda *_: None
    server.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.tls.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
