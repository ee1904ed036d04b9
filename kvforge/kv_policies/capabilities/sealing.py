"""Sealing: pages that are written exactly and stored in few bits once they are full."""


class Sealing:
    """K and V are written to exact pages. The policy's insertion seals those that are full, and attends to both."""

    def num_exact_pages(self, max_num_seqs: int, max_num_tokens: int, page_size: int) -> int:
        """Return the exact pages for so many running sequences and tokens a step: T tokens touch at most
        T / page_size pages and two more of each of their sequences; a sequence that is not in a step has one."""
        return 2 * max_num_seqs + -(-max_num_tokens // page_size)
