"""Divides the M axis into buckets, so that a server with thousands of M tunes a few problems."""

from __future__ import annotations

import itertools

from tmm_core.spec.problem import Problem

#: Maximum number of rows of a bucket with two measurements inside.
WIDE = 256


def bucket_edge(m: int) -> int:
    """Return the upper edge of the bucket of ``m``: the size whose choice serves ``m``.

    Up to 64 the edges are powers of two. A decode kernel's tile has 16 to 64 rows, and all sizes in
    a bucket take the same time. Above 64 there are four edges per octave. A choice is then made at
    a size at most 25 % above the size that it serves.

    >>> [bucket_edge(m) for m in (1, 3, 16, 17, 65, 300, 4096, 4097)]
    [1, 4, 16, 32, 80, 320, 4096, 5120]
    """
    if m <= 64:
        return 1 << max(0, m - 1).bit_length()
    return -(-m // _step(m)) * _step(m)


def bucketed(problem: Problem) -> Problem:
    """Return the problem at the edge of the bucket; its record answers for ``problem``."""
    return problem.at(bucket_edge(problem.extent))


def probes(edge: int) -> tuple[int, ...]:
    """Return the M inside the bucket of ``edge`` at which a record is measured, besides the edge.

    They are odd: the smallest M of the bucket and one in its middle. If the bucket is wider than
    two large tiles, there is one in every quarter. Times of tile kernels grow in steps: for
    2434×5120², the best config at M = 2305 and 2560 took 1.15 times the best one. Empty if the
    bucket is only its edge.

    >>> [probes(edge) for edge in (1, 2, 4, 16, 64, 320, 5120)]
    [(), (), (3,), (9, 13), (33, 49), (257, 289), (4097, 4353, 4609, 4865)]
    """
    below = edge // 2 if edge <= 64 else edge - _step(edge)
    parts = 4 if edge - below > WIDE else 2
    inside = [below + 1 + (edge - below) * part // parts for part in range(parts)]
    return tuple(m for m in dict.fromkeys(m if m % 2 else m + 1 for m in inside) if m < edge)


def between(edge: int) -> tuple[int, ...]:
    """Return further M inside the bucket of ``edge``, at which only BLAS is timed. BLAS needs no
    compilation, and its time is no monotonic function of M (docs/notes/tuning.md). Empty up to 64.

    >>> [between(edge) for edge in (64, 80, 320, 5120)]
    [(), (67, 69, 71, 74, 76, 78), (265, 273, 281, 296, 304, 312), (4225, 4481, 4737, 4992)]
    """
    probed = probes(edge) if edge > 64 else ()
    found = []
    for start, end in itertools.pairwise((*probed, edge)):
        parts = 2 if len(probed) > 2 else 4
        found += [start + (end - start) * part // parts for part in range(1, parts)]
    return tuple(found)


def inside(problem: Problem) -> tuple[int, ...]:
    """Return the other M at which a record of ``problem`` is measured; none unless its M is an
    edge."""
    edge = problem.extent
    return probes(edge) if edge == bucket_edge(edge) else ()


def _step(m: int) -> int:
    """Return the width of the bucket of ``m`` beyond 64."""
    return 1 << ((m - 1).bit_length() - 3)
