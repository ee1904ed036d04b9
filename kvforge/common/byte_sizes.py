"""Bytes as people read them."""


def format_bytes(count: float) -> str:
    """Return a number of bytes in the largest binary unit that makes it at least 1: ``384 bytes``, ``1.5 KiB``,
    ``14.95 GiB``; nothing above GiB."""
    power = min(max(int(count).bit_length() - 1, 0) // 10, 3)
    return f"{count:.0f} bytes" if power == 0 else f"{count / 2 ** (10 * power):.{min(power, 2)}f} {'KMG'[power - 1]}iB"
