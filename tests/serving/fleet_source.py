"""What a fleet's edges follow: signed policies on a web server."""

import json
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


class Key:
    """A key pair, and its public half in the file public.pem."""

    def __init__(self, folder):
        self.private = Ed25519PrivateKey.generate()
        pem, kind = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        (folder / "public.pem").write_bytes(self.private.public_key().public_bytes(pem, kind))

    def signed(self, policy):
        """Return a policy's file, issued now, and its signature."""
        dates = {"issued_at": datetime.now(UTC).isoformat(), "expires_at": None}
        content = json.dumps({**policy.model_dump(mode="json"), **dates}).encode()
        return content, self.private.sign(content)


class Source(ThreadingHTTPServer):
    """A web server of `files`: a policy and its signature, at `url`/policy.json and .sig."""

    daemon_threads = True

    def __init__(self):
        self.files = None
        source = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                content = source.files[self.path.endswith(".sig")]
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def close(self):
        self.shutdown()
        self.server_close()


def with_fleet(pool, **fleet):
    """Write a pool file's fleet; periods are short."""
    content = yaml.safe_load(pool.read_text())
    content["serving"] = {"fleet": {"state": "state", "every_s": 0.03, "name": "shop-17", **fleet}}
    pool.write_text(yaml.safe_dump(content))
    return pool
