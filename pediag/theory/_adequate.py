"""Smallest adequate rotary bases at customary widths and lengths, so that none of them has to be searched again.

Width of the rotation -> length in tokens -> base. Found by :func:`pediag.theory.reach.smallest_adequate_base` and
rounded up to the eighth digit that is adequate too; the tests hold every entry to an independent sum.
"""

from __future__ import annotations

ADEQUATE: dict[int, dict[int, float]] = {
    32: {8192: 3133523.8, 16384: 27396204, 32768: 158124870, 65536: 699404520, 131072: 3698445700},
    48: {8192: 950687.9, 16384: 4237448.1, 32768: 12340856, 65536: 16731778, 131072: 92966299},
    64: {
        8192: 323744.2,
        16384: 1358604.8,
        32768: 3788343.6,
        65536: 4867184.5,
        131072: 73779832,
        262144: 396000650,
    },
    80: {8192: 288609.5, 16384: 396335.2, 32768: 2407486.0, 65536: 7698447.2, 131072: 33849330},
    96: {8192: 103141.25, 16384: 500217.53, 32768: 726714.3, 65536: 4773656.6, 131072: 16748919},
    112: {8192: 113770.3, 16384: 338953.31, 32768: 709975.6, 65536: 3527788.8, 131072: 6823155.9},
    128: {
        8192: 83763.85,
        16384: 231643.66,
        32768: 629978.3,
        65536: 2090179.8,
        131072: 4869104.5,
        262144: 25826268,
    },
    160: {8192: 57724.7, 16384: 171425.04, 32768: 373869.2, 65536: 1160903.2, 131072: 4218263.7},
    192: {8192: 49738.8, 16384: 166732.9, 32768: 415651.0, 65536: 727063.5, 131072: 2815003.3},
    256: {8192: 41307.4, 16384: 103607.7, 32768: 223815.31, 65536: 675551.8, 131072: 1713962.9},
}


def listed(width: int, length: int, least: float = 0.0) -> tuple[float, int] | None:
    """A listed base, ``least`` or more, and the length in tokens, ``length`` or more, that it is adequate for.

    None when the width or the length is not listed, or every listed base is below ``least``.
    """
    lengths = ADEQUATE.get(width, {})
    for known, base in lengths.items():
        if known >= length and base >= least:
            return base, known
    return None
