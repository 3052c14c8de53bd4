"""Data that is nearly what a parser expects: cut, flipped, doubled, made up here and there."""

from hypothesis import strategies as st

NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1]


@st.composite
def bent(draw: st.DrawFn, whole: bytes, *, most: int = 8) -> bytes:
    """The data with a few changes; sometimes none."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(0, most))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["flip", "put", "number", "cut", "double", "end"])):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "put":
                piece = draw(st.binary(min_size=1, max_size=24))
                data[at : at + len(piece)] = piece
            case "number":
                size = draw(st.sampled_from([1, 2, 4, 8]))
                number = draw(st.sampled_from(NUMBERS)) % (1 << 8 * size)
                data[at : at + size] = number.to_bytes(size, "big")
            case "cut":
                del data[at : at + draw(st.integers(1, 600))]
            case "double":
                data[at:at] = data[at : at + draw(st.integers(1, 600))]
            case "end":
                del data[at:]
            case _:
                pass
    return bytes(data)
