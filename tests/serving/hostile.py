"""Requests for inference, right and wrong, as clients of every kind send them."""

import gzip
import http.client
import json
import struct
import time
import zlib
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

# The service's own limits, and a time that none of its answers takes even where the machine is busy.
INPUTS = {
    "x": {"datatype": "FP32"},
    "pixels": {"datatype": "UINT8", "shape": [-1, 2]},
    "note": {"datatype": "BYTES"},
}
MOST_ROWS, MOST_BYTES = 64, 200_000
ANSWER_DEADLINE_S = 30
OUTPUTS = {
    "prediction": "i4",
    "prediction_label": "O",
    "confidence": "f4",
    "probabilities": "f4",
    "stage": "i1",
    "cost": "f4",
}
OUTPUTS["degraded"] = "?"

# What JSON may hold in any place, and what it may not.
LITERALS = [
    *("null", "true", "0", "-1", "1", "1.5", "-0.0", "1e999", "-1e999", "1e-400", "NaN", "Infinity", "-Infinity"),
    *("255", "256", "4294967296", "9223372036854775807", "18446744073709551616", "9" * 400, "9" * 6000, "0x1", "01"),
    *('""', '"x"', '"FP32"', '"BYTES"', '"small"', '"\\u0000"', '"\\ud800"', '"\\ud83d\\ude00"', '"é\u2028"', "'x'"),
    *("[]", "{}", "[[]]", "[1, 2]", '["x"]', '{"name": "x"}', '{"shared_memory_region": "x"}'),
    *("[" * 150 + "]" * 150, "[" * 5000, '{"a":' * 3000 + "1" + "}" * 3000, '"' + "y" * 3000 + '"', ""),
]


@dataclass
class Asked:
    """What is sent: a JSON document, raw bytes after it, headers; xs: what a right answer is about, None if wrong."""

    document: dict
    raw: bytes
    xs: list[float] | None
    headers: dict[str, str] = field(default_factory=dict)
    encoding: str | None = None
    chunked: bool = False
    body: bytes = b""

    def encode(self, text=None):
        """Make the body of the document, or of what a text of it became."""
        text = (json.dumps(self.document) if text is None else text).encode(errors="surrogatepass")
        if self.raw:
            self.headers["Inference-Header-Content-Length"] = str(len(text))
        self.body = text + self.raw
        if self.encoding is not None:
            self.headers["Content-Encoding"] = self.encoding
            self.body = {"gzip": gzip.compress, "deflate": zlib.compress}[self.encoding](self.body)
        return self


@st.composite
def right_requests(draw):
    """Draw what must be answered."""
    n, height = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    sizes = st.floats(2**-10, 1e6, width=32) | st.floats(-1e6, -(2**-10), width=32)
    xs = draw(st.lists(sizes, min_size=n, max_size=n))
    pixels = draw(st.lists(st.integers(0, 255), min_size=n * height * 2, max_size=n * height * 2))
    notes = draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=8), min_size=n, max_size=n))
    values = {
        "x": ("FP32", [n], xs, np.array(xs, "<f4").tobytes()),
        "pixels": ("UINT8", [n, height, 2], pixels, bytes(pixels)),
        "note": ("BYTES", [n], notes, b"".join(struct.pack("<I", len(t.encode())) + t.encode() for t in notes)),
    }
    inputs, raw = [], b""
    for name in draw(st.permutations(list(values))):
        datatype, shape, data, packed = values[name]
        tensor = {"name": name, "datatype": datatype, "shape": shape}
        if draw(st.booleans()):
            inputs.append({**tensor, "parameters": {"binary_data_size": len(packed)}})
            raw += packed
        else:
            nested = np.array(data, dtype=object).reshape(shape).tolist()
            inputs.append({**tensor, "data": draw(st.sampled_from([data, nested]))})
    document = {"inputs": inputs}
    if draw(st.booleans()):
        names = draw(st.lists(st.sampled_from(list(OUTPUTS)), unique=True, min_size=1))
        document["outputs"] = [{"name": one, "parameters": {"binary_data": draw(st.booleans())}} for one in names]
    parameters = {"max_cost": 1e6, "max_stage": "large", "binary_data_output": draw(st.booleans())}
    document["parameters"] = {name: parameters[name] for name in draw(st.sets(st.sampled_from(list(parameters))))}
    if draw(st.booleans()):
        document["id"] = draw(st.text(st.characters(codec="utf-8"), max_size=8))
    encoding = draw(st.sampled_from([None, None, "gzip", "deflate"]))
    return Asked(document, raw, xs, encoding=encoding, chunked=draw(st.booleans())).encode()


@st.composite
def wrong_requests(draw):
    """Draw what may be refused: requests that were right before some part of them was changed."""
    asked = draw(right_requests())
    asked.xs = None
    changes = draw(st.lists(st.sampled_from([_changed_value, _changed_key, _changed_text]), max_size=2))
    text = json.dumps(asked.document)
    for change in changes:
        text = change(draw, text)
    if draw(st.integers(0, 3)) == 0:
        asked.raw = draw(st.binary(max_size=40)) if draw(st.booleans()) else asked.raw[: draw(st.integers(0, 20))]
    asked.encode(text)
    if not changes or draw(st.integers(0, 3)) == 0:
        draw(st.sampled_from([_changed_bytes, _changed_headers]))(draw, asked)
    return asked


def _paths(value, path=()):
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _paths(inner, (*path, key))


def _changed_value(draw, text):
    """Put a literal in the place of some value."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return _changed_text(draw, text)
    path = draw(st.sampled_from(list(_paths(document))))
    literal = draw(st.sampled_from(LITERALS))
    if not path:
        return literal
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = "@here@"
    try:
        return json.dumps(document).replace('"@here@"', literal)
    except RecursionError:
        return literal


def _changed_key(draw, text):
    """Take a key away, spell it otherwise, or let it stand twice."""
    key = draw(st.sampled_from(["name", "datatype", "shape", "data", "inputs", "outputs", "parameters", "id"]))
    literal = draw(st.sampled_from(LITERALS))
    new = draw(st.sampled_from([f'"{key}2": ', f'"{key}": {literal}, "{key}": ', f'"\\u0000{key}": ', f'"{key}" ']))
    return text.replace(f'"{key}": ', new, draw(st.sampled_from([1, -1])))


def _changed_text(draw, text):
    """Cut it off, or put something into its middle."""
    at = draw(st.integers(0, max(0, len(text) - 1)))
    odd = draw(st.sampled_from(["", "\ufeff", "\x00", "\ud800", "//", "\n", ",", "]", "}", '"', "\\", "9" * 500]))
    return text[:at] + odd + (text[at:] if draw(st.booleans()) else "")


def _changed_bytes(draw, asked):
    at = draw(st.integers(0, len(asked.body)))
    how = draw(st.sampled_from(["cut", "put", "flip", "twice", "utf-16", "long"]))
    if how == "cut":
        asked.body = asked.body[:at]
    elif how == "put":
        asked.body = asked.body[:at] + draw(st.binary(max_size=20)) + asked.body[at:]
    elif how == "flip":
        asked.body = bytes(b ^ 0xFF if place == at else b for place, b in enumerate(asked.body))
    elif how == "twice":
        asked.body *= 2
    elif how == "utf-16":
        asked.body = asked.body.decode("latin-1").encode("utf-16")
    else:
        asked.body = gzip.compress(bytes(20 * MOST_BYTES)) if asked.encoding == "gzip" else bytes(MOST_BYTES + 1)


def _changed_headers(draw, asked):
    numbers = st.sampled_from(["0", "1", "-1", "+5", "1e3", "9" * 11, "9" * 30, "\xb2", "", " ", "0x10", "10, 10"])
    name, values = draw(
        st.sampled_from(
            [
                ("Inference-Header-Content-Length", numbers | st.integers(0, 400).map(str)),
                ("Content-Encoding", st.sampled_from(["gzip", "deflate", "br", "GZIP", "gzip, gzip", "", "\xe9"])),
                ("Content-Type", st.sampled_from(["text/plain", "application/octet-stream", "", "\xe9", "a/b; c=d"])),
                ("x-request-id", st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=3000)),
                ("Authorization", st.sampled_from(["Bearer x", "\xe9", "Basic", ""])),
                ("Accept-Encoding", st.sampled_from(["br", "gzip", "*;q=0"])),
                ("traceparent", st.sampled_from(["00-0-0-0", "\xff", "00-" + "f" * 32 + "-" + "0" * 16 + "-01"])),
                ("serve_multiplexed_model_id", st.just("x")),
            ]
        )
    )
    asked.headers[name] = draw(values)


def post(url, path, asked, method="POST"):
    """Send a request over a connection of its own; return status, headers, body and how long it took, in seconds."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=ANSWER_DEADLINE_S)
    started = time.monotonic()
    try:
        pieces = [asked.body[:7], asked.body[7:]]
        body = (piece for piece in pieces if piece) if asked.chunked else asked.body
        connection.request(method, path, body, asked.headers, encode_chunked=asked.chunked)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read(), time.monotonic() - started
    finally:
        connection.close()


def read_answer(headers, body):
    """Return the outputs of a 200 by name, as arrays, read as the protocol says and by none of our own code."""
    length = headers.get("Inference-Header-Content-Length")
    text, raw = (body, b"") if length is None else (body[: int(length)], body[int(length) :])
    message = json.loads(text)
    arrays = {}
    for output in message["outputs"]:
        dtype, shape = np.dtype(OUTPUTS[output["name"]]), output["shape"]
        if "data" in output:
            values = np.array(output["data"], dtype)
        else:
            size = output["parameters"]["binary_data_size"]
            part, raw = raw[:size], raw[size:]
            values = _elements(part) if dtype.hasobject else np.frombuffer(part, dtype.newbyteorder("<"))
        arrays[output["name"]] = values.reshape(shape)
    assert raw == b""
    return message, arrays


def _elements(raw):
    elements = []
    while raw:
        (size,) = struct.unpack_from("<I", raw)
        elements.append(raw[4 : 4 + size].decode())
        raw = raw[4 + size :]
    return np.array(elements, dtype=object)
