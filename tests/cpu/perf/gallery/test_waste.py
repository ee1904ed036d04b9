"""Usage of a cache by pieces and by pages: small cases by hand, and what no case may break."""

import pytest

from perf.gallery.contiguous import RESERVES, Piece, Usage, first_fit, serve_contiguous
from perf.gallery.requests import CHAT, INSTRUCTIONS, MAX_SEQ_LEN
from perf.gallery.waste import serve_paged


def test_the_first_gap_that_fits_is_taken() -> None:
    pieces = [Piece(2, 3, 3, 1), Piece(7, 2, 2, 1)]  # gaps: 0-2, 5-7, 9-12
    assert [first_fit(pieces, 12, size) for size in (1, 2, 3, 4)] == [0, 0, 9, None]
    assert first_fit([], 5, 5) == 0 and first_fit([], 5, 6) is None


def test_reserves_by_hand() -> None:
    sizes = {name: [reserve(10, 25), reserve(10, 32), reserve(1024, 1024)] for name, reserve in RESERVES.items()}
    assert list(sizes.values()) == [[2048] * 3, [42, 42, 2048], [35, 42, 2048]]


def test_pieces_by_hand() -> None:
    """Two requests of 2 + 3 tokens in 8 slots, pieces of 5: the second waits for 3 steps, of 2, 3 and 4 computed tokens
    (the last token of an output is not computed); three slots lie outside."""
    usage = serve_contiguous([(2, 3), (2, 3)], 8, RESERVES["one piece, known length"])
    assert usage == [Usage(tokens, 4 - tokens, 1, 3, 1) for tokens in (2, 3, 4)]


def test_pages_by_hand() -> None:
    """Four pages of 2, of which the second request needs all: the first has 1, 2 and 2 for 2, 3 and 4 tokens."""
    usage = serve_paged([(2, 3), (8, 1)], 8, 2)
    assert usage == [Usage(2, 0, 0, 6, 1), Usage(3, 0, 1, 4, 1), Usage(4, 0, 0, 4, 1)]


@pytest.mark.parametrize("lengths", [CHAT, INSTRUCTIONS])
@pytest.mark.parametrize("page_size", [16, 64])
def test_parts_add_up_and_a_page_bounds_what_is_never_used(lengths, page_size: int) -> None:
    requests = lengths.draw(60, seed=1)
    assert all(1 <= number <= MAX_SEQ_LEN // 2 for pair in requests for number in pair)
    moments = serve_paged(requests, MAX_SEQ_LEN, page_size)
    assert moments
    for moment in moments:
        assert moment.inside < page_size * moment.num_running and moment.reserved == 0
    for reserve in RESERVES.values():
        pieces = serve_contiguous(requests, MAX_SEQ_LEN, reserve)
        assert pieces
        moments += pieces
    for moment in moments:
        parts = moment.tokens, moment.reserved, moment.inside, moment.outside
        assert min(parts) >= 0 and sum(parts) == MAX_SEQ_LEN
