"""What a fleet's edges talk to: keys, signed policies, and a web server with ETags that the test holds in its hand."""

import hashlib
import json
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PEM = serialization.Encoding.PEM


class Key:
    """A key pair, and its public half in a file."""

    def __init__(self, folder, name="public"):
        self.private = Ed25519PrivateKey.generate()
        self.public_file = folder / f"{name}.pem"
        kind = serialization.PublicFormat.SubjectPublicKeyInfo
        self.public_file.write_bytes(self.private.public_key().public_bytes(PEM, kind))
        self.private_file = folder / f"{name}-private.pem"
        form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        self.private_file.write_bytes(self.private.private_bytes(PEM, form, plain))

    def signed(self, policy, issued_in_s=0.0, expires_in_s=None, **more):
        """Return a policy's file with dates from now on, and its signature."""
        now = datetime.now(UTC)
        expires = None if expires_in_s is None else (now + timedelta(seconds=expires_in_s)).isoformat()
        dates = {"issued_at": (now + timedelta(seconds=issued_in_s)).isoformat(), "expires_at": expires}
        content = json.dumps({**policy.model_dump(mode="json"), **dates, **more}).encode()
        return content, self.private.sign(content)


class Source:
    """A web server at /policy.json and /policy.json.sig; it keeps what is posted.

    files: (policy, signature), or None, which is answered with 404.   asked: paths and statuses of all GETs.
    after_get: called with its path after each GET.   on_post: returns the status for what was posted, None to hang up.
    """

    def __init__(self, tls=None):
        self.files, self.asked, self.posted = (None, None), [], []
        self.after_get, self.on_post = lambda path: None, lambda body: 200
        self.headers = []
        source = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                content = source.files[self.path.endswith(".sig")] if self.path.startswith("/policy.json") else None
                source.headers.append(dict(self.headers))
                etag = f'"{hashlib.sha256(content or b"").hexdigest()}"'
                status = 404 if content is None else 304 if self.headers["If-None-Match"] == etag else 200
                source.asked.append((self.path, status))
                self.answer(status, b"" if status != 200 else content, ETag=etag)
                source.after_get(self.path)

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                source.headers.append(dict(self.headers))
                status = source.on_post(body)
                source.posted.append(json.loads(body))
                if status is None:
                    self.close_connection = True
                else:
                    self.answer(status, b"{}")

            def answer(self, status, content, **headers):
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # clients that go away, or have no certificate
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def with_fleet(pool, **fleet):
    """Write a pool file's fleet; periods are short."""
    content = yaml.safe_load(pool.read_text())
    fleet = {"state": "state", "every_s": 0.03, "name": "shop-17", **fleet}
    content["serving"] = {"fleet": {key: str(value) if key == "public_key" else value for key, value in fleet.items()}}
    pool.write_text(yaml.safe_dump(content))
    return pool
