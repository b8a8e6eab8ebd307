"""A stream of bytes in chunks of whole lines, so that a file of any size is read in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

CHUNK_BYTES = 2**23


def chunks(stream: IO[bytes], *, quotes: bool = False) -> Iterator[bytes]:
    """The rest of the stream in pieces of about CHUNK_BYTES, each ending at a line's end (the last: at the end).

    quotes: a line break between two double quotes ends no line (CSV). A quote that is never closed makes the rest of
    the file one piece.
    """
    rest = b""
    while piece := stream.read(CHUNK_BYTES):
        data = rest + piece
        cut = data.rfind(b"\n") + 1
        inside = data.count(b'"', 0, cut) % 2 if quotes else 0
        while cut and inside:
            earlier = data.rfind(b"\n", 0, cut - 1) + 1
            inside ^= data.count(b'"', earlier, cut) % 2
            cut = earlier
        rest = data[cut:]
        if cut:
            yield data[:cut]
    if rest:
        yield rest
