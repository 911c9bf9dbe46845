"""Tensors of every datatype and shape, drawn by hypothesis, and what must hold of messages to clients."""

from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cauc_ray.serving.faults import RequestError
from cauc_ray.serving.tensors import DATATYPES, Tensor

SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@st.composite
def tensors(draw, *, name="x", json=False, shapes=SHAPES, datatypes=tuple(DATATYPES)):
    """Return a tensor; json: one that JSON can hold, without NaN, infinities and bytes that are no UTF-8."""
    datatype = draw(st.sampled_from(datatypes))
    dtype = DATATYPES[datatype]
    options = {"allow_nan": False, "allow_infinity": False} if json and dtype.kind == "f" else {}
    if datatype != "BYTES":
        elements = hnp.from_dtype(dtype, **options)
    else:
        elements = st.text(max_size=9).map(str.encode) if json else st.binary(max_size=9)
    return Tensor(name, datatype, draw(hnp.arrays(dtype, draw(shapes), elements=elements)))


def same(values, expected):
    """Say whether two arrays are the same to the last bit: NaN equals itself, 0.0 is not -0.0."""
    if values.dtype != expected.dtype or values.shape != expected.shape:
        return False
    if values.dtype == object:
        return all(type(one) is type(other) for one, other in zip(values.flat, expected.flat, strict=True)) and bool(
            (values == expected).all()
        )
    return values.tobytes() == expected.tobytes()


def is_one_sentence(message):
    """Say whether a client can be told a message as it is."""
    message.encode()
    return 10 < len(message) < 1000 and len(message.splitlines()) == 1 and message.isprintable()


def refusal(call, *given):
    """Call and return the RequestError that is raised, whose message a client can be told; None where none is."""
    try:
        call(*given)
    except RequestError as error:
        told = error
    else:
        return None
    assert is_one_sentence(told.message)
    return told
