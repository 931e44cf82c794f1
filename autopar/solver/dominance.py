"""How much worse can it get if a node takes strategy b in place of a, whatever all the others do?

Dead-end elimination (Goldstein 1994), for this objective. For node n and strategies a, b:

    c[b] - c[a] + Σ_v D_v[a,b] + Σ_g max(0, H_g[a,b] + K_g[a] - K_g[b]) <= 0   and   bytes never grow
      ⇒ a can be dropped: in any choice with a, b costs no more and fits.

D_v[a,b] bounds the growth of what value v pays, over all layouts that its other ends can have:

    n makes v, one reader:         max_q (r[p_b,q] - r[p_a,q])
    n makes v, several readers:    Σ_q max(0, r[p_b,q] - r[p_a,q])         over every q that some reader can want
    n reads v, nobody else does:   max_p (r[p,q_b] - r[p,q_a])
    n reads v, others do too:      max_p r[p,q_b], or 0 if q_b = q_a or some other reader always wants q_b
    n has several roles in v:      0 if all its layouts are the same, else inf

Pairs (p,q) that a itself can't have (r infinite) don't count. With a value in overlap group g the same number goes
into H_g, where less conversion is no sure gain, hence the max. "Same made and wants, cheaper, no more bytes" and
"reachable by free conversion" are the special cases D = 0 and D <= 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.solver.linear import Bools, Floats, Ints
from autopar.solver.view import Reader, VersionTable, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """Worst growth when b replaces a, indexed [a, b]: µs to wait for, µs to hide per group, and whether bytes may grow.

    The node's own cost, cover and held bytes are not in it; `grows_bytes` is [moment, a, b] over
    `View.moments_of` the node.
    """

    wait_us: Floats
    hide_us: dict[int, Floats]
    grows_bytes: Floats


def worst_growth(view: View, node: int, leave_out: frozenset[int] = frozenset()) -> Worst:
    """Σ_v D_v over the values that `node` makes or reads, but for `leave_out`."""
    count = len(view.cost[node])
    wait = np.zeros((count, count))
    hide: dict[int, Floats] = {}
    for index in view.values_of[node]:
        if index in leave_out:
            continue
        grown = _value_growth(view, node, index)
        group = view.problem.values[index].group
        if group is None:
            wait += grown
        else:
            hide[group] = hide.get(group, np.zeros((count, count))) + grown
    return Worst(wait_us=wait, hide_us=hide, grows_bytes=_bytes_growth(view, node, leave_out))


def no_worse(view: View, node: int, worst: Worst) -> Bools:
    """[a, b]: b may stand for a."""
    cost, cover, held = view.cost[node], view.cover[node], view.held[node][view.moments_of[node]]
    grown = cost[None, :] - cost[:, None] + worst.wait_us
    group = view.group[node]
    hide = dict(worst.hide_us)
    if group is not None:
        hide[group] = hide.get(group, 0.0) + cover[:, None] - cover[None, :]
    for more in hide.values():
        grown = grown + np.maximum(0.0, more)
    fits = (worst.grows_bytes + held[:, None, :] - held[:, :, None] <= 0).all(axis=0)
    result: Bools = (grown <= 0) & fits
    return result


def _value_growth(view: View, node: int, index: int) -> Floats:
    """D_v[a, b]."""
    value, price = view.problem.values[index], view.price[index]
    mine = [r for r in view.readers[index] if r.node == node]
    others = [r for r in view.readers[index] if r.node != node]
    if value.producer == node and not mine:
        made = view.made[index]
        return _makes(price, others)[np.ix_(made, made)]
    if value.producer != node and len(mine) == 1:
        wants = mine[0].wants
        return _reads(price, np.unique(view.made[index]), others)[np.ix_(wants, wants)]
    roles = [r.wants for r in mine] + ([view.made[index]] if value.producer == node else [])
    return np.where(_same(roles), 0.0, np.inf)


def _makes(price: Floats, readers: list[Reader]) -> Floats:
    """[p_a, p_b] for the producer."""
    if not readers:
        return np.zeros_like(price)
    wanted = np.unique(np.concatenate([r.wants for r in readers]))
    before, after = price[:, None, wanted], price[None, :, wanted]
    if len(readers) == 1:
        least: Floats = _difference(before, after).max(axis=2)
        return least
    total: Floats = np.maximum(0.0, _difference(before, after)).sum(axis=2)
    return total


def _reads(price: Floats, given: Ints, others: list[Reader]) -> Floats:
    """[q_a, q_b] for a reader."""
    before, after = price[given][:, :, None], price[given][:, None, :]
    if not others:
        least: Floats = _difference(before, after).max(axis=0)
        return least
    grown: Floats = np.where(np.isinf(before), 0.0, after).max(axis=0)
    np.fill_diagonal(grown, 0.0)
    for reader in others:
        if (reader.wants == reader.wants[0]).all():
            grown[:, reader.wants[0]] = 0.0
    return grown


def _difference(before: Floats, after: Floats) -> Floats:
    """after - before where before is finite; very negative where it is not, as a can't be there."""
    impossible = np.isinf(before)
    return np.where(impossible, -1e300, after - np.where(impossible, 0.0, before))


def _same(roles: list[Ints]) -> Bools:
    """[a, b]: equal layouts in every role."""
    result = np.ones((len(roles[0]), len(roles[0])), dtype=bool)
    for layouts in roles:
        result &= layouts[:, None] == layouts[None, :]
    return result


def _bytes_growth(view: View, node: int, leave_out: frozenset[int]) -> Floats:
    """[moment, a, b]: growth of the versions that the node reads, over `moments_of` it."""
    count, moments = len(view.cost[node]), view.moments_of[node]
    total = np.zeros((len(moments), count, count))
    for index in view.versions_of[node]:
        version = view.versions[index]
        if version.value not in leave_out:
            total += _version_growth(version, node, moments)
    return total


def _version_growth(version: VersionTable, node: int, moments: list[int]) -> Floats:
    mine = [r.wants for r in version.readers if r.node == node]
    sizes = version.sizes[moments][:, mine[0]]
    if len(version.readers) == 1:
        return sizes[:, None, :] - sizes[:, :, None]
    if len(mine) == 1:
        return np.where(_same(mine)[None], 0.0, sizes[:, None, :])
    return np.where(_same(mine)[None], 0.0, np.inf)
