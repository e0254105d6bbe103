"""Inner loops over the ledger's arrays: pure functions that run compiled or as plain Python, with equal digests.

Owns every compiled function of kvcore; all of them and their callees stand in this file, because a cached
caller does not notice a changed callee elsewhere. Invariant: integers only, one order of work, no state of
its own; every write of a digested cell adds (new - old) times the cell's weight to `sums` (uint64 [4]:
committed lanes, machine lanes).
Layouts, int64: block records [blocks, 8]; request records [slots, 16 + 3 * groups]; `spaces` uint64 [4] holds
the key spaces of block records, free stack, table cells and request records. Tables and stacks are flat int32.
Source: LEDGER "Determinism", "Two digests".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import config, njit

from .digest import GOLDEN, SECOND, field_salts

REF, ROWS, ENTRY, NODE, OWNER, GENERATION, PINS, PLACE = range(8)
BLOCK_FIELDS = 8

ACTIVE, SCOPE, NUM_TOKENS, TOKEN_PRINT, VALID, SLOT_GENERATION, TERMINAL, SHARED = range(8)
TRANSACTION, DISPATCHED, FLIGHT_STEP, FLIGHT_ROW, FLIGHT_COUNT, ENDING, CUT, BRANCH = range(8, 16)
GROUP_FIELDS = 16
GROUP_STRIDE = 3
HELD, SOURCE, FIRST = range(GROUP_STRIDE)
"""Group g's fields are 16 + 3 g and the two after it: cells in use, the block (+ 1) its tail is copied from, and how
many leading cells its window has left behind."""
MAX_GROUPS = 8
GONE = -1
"""The cell of a block that left its window. No kernel reads a cell that lies wholly outside the window."""

EVICTABLE, LIVE, RESERVED, FREE = range(4)
STALE, BUSY, SENSELESS, OUT_OF_ORDER, BEYOND_KNOWN, BEYOND_TABLE, FITS = range(7)
BAD_DISCARD, BAD_SAMPLE_ROW, BAD_TOKEN, SAMPLED_DISCARD, SAMPLE_OUT_OF_ORDER, COMPLETES = range(6)
UNSAMPLED, DISCARDED = -1, -2

_GOLDEN = np.uint64(GOLDEN)
_SECOND = np.uint64(SECOND)
_MIX_A = np.uint64(0xFF51AFD7ED558CCD)
_MIX_B = np.uint64(0xC4CEB9FE1A85EC53)
_S33 = np.uint64(33)
_S29 = np.uint64(29)
_ONE = np.uint64(1)
_MINUS_ONE = np.uint64((1 << 64) - 1)
_SALT_A, _SALT_B = field_salts(GROUP_FIELDS + GROUP_STRIDE * MAX_GROUPS)
_LARGEST_TOKEN = (1 << 31) - 1
_STRETCH = 256


def _plain(loop: Callable[..., Any]) -> Callable[..., Any]:
    return np.errstate(over="ignore")(loop)


if vars(config)["DISABLE_JIT"]:
    _jit = _plain
    _callee = _plain
else:
    _jit = njit(cache=True, nogil=True, error_model="numpy")
    # Inlined before compilation: a call that passes arrays would count their references in every row.
    _callee = njit(nogil=True, error_model="numpy", inline="always")


@_callee
def _mix(word):
    """A nonzero word: no bits of the given one are left where they were."""
    word ^= word >> _S33
    word *= _MIX_A
    word ^= word >> _S33
    word *= _MIX_B
    word ^= word >> _S33
    return word | _ONE


@_callee
def _weight(space, index):
    return _mix(np.uint64(index) * _GOLDEN + space)


@_callee
def _other(weight):
    return ((weight ^ (weight >> _S29)) * _SECOND) | _ONE


@_callee
def _word(value):
    return np.uint64(np.int64(value))


@_callee
def _set_cell(cells, index, value, space, sums, lane):
    """One int32 cell of a table or a stack."""
    change = _word(value) - _word(cells[index])
    weight = _weight(space, index)
    cells[index] = value
    sums[lane] += change * weight
    sums[lane + 1] += change * _other(weight)


@_callee
def _class(ref, rows, node):
    """Index into the tally."""
    if ref > 0:
        return LIVE if rows > 0 else RESERVED
    return EVICTABLE if node != 0 else FREE


@_callee
def _take(blk, cells, top, scope, spaces, sums, tally):
    """Pops one block and gives it to a scope; (block, whether it holds another scope's bytes)."""
    block = np.int64(cells[top]) - 1
    _set_cell(cells, top, 0, spaces[1], sums, 2)
    held = blk[block, OWNER]
    blk[block, REF] = 1
    blk[block, OWNER] = scope
    change = _word(scope) - _word(held)
    weight = _weight(spaces[0], block)
    other = _other(weight)
    sums[0] += _SALT_A[REF] * weight
    sums[1] += _SALT_B[REF] * other
    sums[2] += change * _SALT_A[OWNER] * weight
    sums[3] += change * _SALT_B[OWNER] * other
    tally[FREE] -= 1
    tally[RESERVED] += 1
    return block, held != 0 and held != scope


@_callee
def _lease(blk, block, spaces, sums, tally):
    """One more reference on a block."""
    ref, rows, node = blk[block, REF], blk[block, ROWS], blk[block, NODE]
    blk[block, REF] = ref + 1
    tally[_class(ref, rows, node)] -= 1
    tally[_class(ref + 1, rows, node)] += 1
    weight = _weight(spaces[0], block)
    sums[0] += _SALT_A[REF] * weight
    sums[1] += _SALT_B[REF] * _other(weight)


@_callee
def _drop(blk, block, spaces, sums, tally):
    """One reference less on a block, whose rows are forgotten when it becomes free; (whether it was the last, indexed)."""
    ref, rows, node = blk[block, REF], blk[block, ROWS], blk[block, NODE]
    blk[block, REF] = ref - 1
    weight = _weight(spaces[0], block)
    other = _other(weight)
    tally[_class(ref, rows, node)] -= 1
    tally[_class(ref - 1, rows, node)] += 1
    if ref == 1 and node == 0:
        blk[block, ROWS] = 0
        blk[block, GENERATION] += 1
        sums[0] -= (_SALT_A[REF] + _word(rows) * _SALT_A[ROWS]) * weight
        sums[1] -= (_SALT_B[REF] + _word(rows) * _SALT_B[ROWS]) * other
        sums[2] += _SALT_A[GENERATION] * weight
        sums[3] += _SALT_B[GENERATION] * other
    else:
        sums[0] -= _SALT_A[REF] * weight
        sums[1] -= _SALT_B[REF] * other
    return ref == 1, node != 0


@_callee
def _disown(blk, block, revoked, spaces, sums):
    """Takes a block's owner away where it is revoked; whether it was."""
    owner = blk[block, OWNER]
    if not revoked[owner]:
        return False
    blk[block, OWNER] = 0
    weight = _weight(spaces[0], block)
    sums[2] -= _word(owner) * _SALT_A[OWNER] * weight
    sums[3] -= _word(owner) * _SALT_B[OWNER] * _other(weight)
    return True


@_callee
def _set_rows(blk, block, rows, spaces, sums, tally):
    ref, old, node = blk[block, REF], blk[block, ROWS], blk[block, NODE]
    change = _word(rows) - _word(old)
    blk[block, ROWS] = rows
    weight = _weight(spaces[0], block)
    sums[0] += change * _SALT_A[ROWS] * weight
    sums[1] += change * _SALT_B[ROWS] * _other(weight)
    tally[_class(ref, old, node)] -= 1
    tally[_class(ref, rows, node)] += 1


# Cells.


@_jit
def put_field(records, index, field, value, space, sums):
    """Writes one field of one record; `sums` uint64 [2] is the digest it belongs to."""
    change = _word(value) - _word(records[index, field])
    records[index, field] = value
    weight = _weight(space, index)
    sums[0] += change * _SALT_A[field] * weight
    sums[1] += change * _SALT_B[field] * _other(weight)


@_jit
def write_field(records, indices, field, values, space, sums):
    """Writes one field of several records; one value goes to all of them."""
    many = len(values) > 1
    for i in range(len(indices)):
        value = values[i] if many else values[0]
        change = _word(value) - _word(records[indices[i], field])
        records[indices[i], field] = value
        weight = _weight(space, indices[i])
        sums[0] += change * _SALT_A[field] * weight
        sums[1] += change * _SALT_B[field] * _other(weight)


@_jit
def put_record(records, index, fields, values, lanes, space, sums):
    """Writes several fields of one record; `lanes` int64 [all fields] names the first lane of each field's digest."""
    weight = _weight(space, index)
    other = _other(weight)
    for i in range(len(fields)):
        field = fields[i]
        change = _word(values[i]) - _word(records[index, field])
        records[index, field] = values[i]
        sums[lanes[field]] += change * _SALT_A[field] * weight
        sums[lanes[field] + 1] += change * _SALT_B[field] * other


@_jit
def fill_cells(cells, start, values, space, sums):
    """Writes values [n] into cells that are zero, from `start` on."""
    first = np.uint64(0)
    second = np.uint64(0)
    for i in range(len(values)):
        cells[start + i] = values[i]
        weight = _weight(space, start + i)
        first += _word(values[i]) * weight
        second += _word(values[i]) * _other(weight)
    sums[0] += first
    sums[1] += second


@_jit
def push_ids(cells, count, ids, space, sums):
    """Pushes ids [n] as id + 1, the first one last, so that it is taken next."""
    first = np.uint64(0)
    second = np.uint64(0)
    top = count + len(ids) - 1
    for i in range(len(ids)):
        value = ids[i] + 1
        cells[top - i] = value
        weight = _weight(space, top - i)
        first += _word(value) * weight
        second += _word(value) * _other(weight)
    sums[0] += first
    sums[1] += second


@_jit
def clear_cells(cells, start, stop, space, sums):
    """Zeroes cells [start, stop)."""
    first = np.uint64(0)
    second = np.uint64(0)
    for i in range(start, stop):
        value = _word(cells[i])
        weight = _weight(space, i)
        first += value * weight
        second += value * _other(weight)
    for i in range(start, stop):
        cells[i] = 0
    sums[0] -= first
    sums[1] -= second


# Tokens.


@_jit
def first_negative(tokens):
    """Position of the first negative token, len(tokens) when there is none."""
    lowest = np.int32(0)
    for i in range(len(tokens)):
        lowest = min(lowest, tokens[i])
    if lowest >= 0:
        return len(tokens)
    for i in range(len(tokens)):
        if tokens[i] < 0:
            return i
    return len(tokens)


@_jit
def common_tokens(left, right):
    """Length of the longest common prefix of two int32 arrays; whole stretches are compared without a branch."""
    both = min(len(left), len(right))
    at = 0
    while at + _STRETCH <= both:
        apart = np.int32(0)
        for i in range(at, at + _STRETCH):
            apart |= left[i] ^ right[i]
        if apart != 0:
            break
        at += _STRETCH
    for i in range(at, both):
        if left[i] != right[i]:
            return i
    return both


@_jit
def page_entries(tokens, weights, page, before, scope_print, found):
    """Fingerprint sums at the end of each page, mixed with the scope's print into nonzero entries: found uint64
    [pages]; the plain sum at the end. `weights` begin at the first token's.
    """
    total = before
    for p in range(len(found)):
        for i in range(p * page, (p + 1) * page):
            total += (_word(tokens[i]) + _ONE) * weights[i]
        found[p] = _mix(total ^ scope_print)
    return total


# Blocks.


@_jit
def lease_blocks(blk, blocks, spaces, sums, tally):
    """One more reference on each block."""
    for i in range(len(blocks)):
        block = blocks[i]
        _lease(blk, block, spaces, sums, tally)


@_jit
def drop_blocks(blk, blocks, freed, spaces, sums, tally):
    """One reference less on each block; unindexed ones that reach zero are listed in `freed`; (freed, evictable)."""
    num_freed = 0
    evictable = 0
    for i in range(len(blocks)):
        block = blocks[i]
        last, indexed = _drop(blk, block, spaces, sums, tally)
        if last and not indexed:
            freed[num_freed] = block
            num_freed += 1
        elif last:
            evictable += 1
    return num_freed, evictable


@_jit
def free_unlisted(blk, blocks, spaces, sums):
    """Blocks without reference and index entry become free under a new generation, their rows forgotten."""
    for i in range(len(blocks)):
        block = blocks[i]
        rows = blk[block, ROWS]
        blk[block, ROWS] = 0
        blk[block, GENERATION] += 1
        weight = _weight(spaces[0], block)
        other = _other(weight)
        sums[0] -= _word(rows) * _SALT_A[ROWS] * weight
        sums[1] -= _word(rows) * _SALT_B[ROWS] * other
        sums[2] += _SALT_A[GENERATION] * weight
        sums[3] += _SALT_B[GENERATION] * other


@_jit
def disown_revoked(blk, blocks, revoked, found, spaces, sums):
    """Blocks of a revoked owner lose it and are listed in `found`; how many."""
    count = 0
    for i in range(len(blocks)):
        block = blocks[i]
        if _disown(blk, block, revoked, spaces, sums):
            found[count] = block
            count += 1
    return count


@_jit
def index_blocks(blk, blocks, node, entries, spaces, sums, tally):
    """Sets node and entry (int64 [n]) of blocks; node 0 takes them out of the index."""
    for i in range(len(blocks)):
        block = blocks[i]
        ref, rows, old = blk[block, REF], blk[block, ROWS], blk[block, NODE]
        change = _word(entries[i]) - _word(blk[block, ENTRY])
        moved = _word(node) - _word(old)
        blk[block, ENTRY] = entries[i]
        blk[block, NODE] = node
        weight = _weight(spaces[0], block)
        other = _other(weight)
        sums[0] += change * _SALT_A[ENTRY] * weight
        sums[1] += change * _SALT_B[ENTRY] * other
        sums[2] += moved * _SALT_A[NODE] * weight
        sums[3] += moved * _SALT_B[NODE] * other
        tally[_class(ref, rows, old)] -= 1
        tally[_class(ref, rows, node)] += 1


@_jit
def set_rows(blk, block, rows, spaces, sums, tally):
    """Valid rows of one block."""
    _set_rows(blk, block, rows, spaces, sums, tally)


# Steps. A row of a step is int64 [4]: slot, generation, start, count.


@_callee
def _page_of(row, held, size):
    """Page of a row; most rows lie on the last page held, which takes no division."""
    base = (held - 1) * size
    if row >= base and row < base + size:
        return held - 1
    return row // size


@_callee
def _pages_for(end, held, size):
    """Pages that hold rows [0, end), at least `held`."""
    if end <= held * size:
        return held
    if end <= (held + 1) * size:
        return held + 1
    return (end + size - 1) // size


@_callee
def _pin_source(blk, block, by, spaces, sums):
    """One copy more (1) or less (2^64 - 1) that reads the block until its step completes."""
    blk[block, PINS] += np.int64(by)
    weight = _weight(spaces[0], block)
    sums[2] += by * _SALT_A[PINS] * weight
    sums[3] += by * _SALT_B[PINS] * _other(weight)


@_jit
def check_rows(rows, req, marks, serial, max_model_len):
    """(fault, row): the first failing check and its first row; FITS when all rows may be computed."""
    fault = FITS
    at = 0
    for i in range(len(rows)):
        slot, generation, start, count = rows[i, 0], rows[i, 1], rows[i, 2], rows[i, 3]
        found = FITS
        if slot < 0 or slot >= len(req) or req[slot, ACTIVE] == 0 or req[slot, SLOT_GENERATION] != generation:
            found = STALE
        else:
            if req[slot, FLIGHT_STEP] != 0 or marks[slot] == serial:
                found = BUSY
            elif count < 1 or count > max_model_len + 1:
                found = SENSELESS
            elif start != req[slot, VALID]:
                found = OUT_OF_ORDER
            elif start + count > req[slot, NUM_TOKENS]:
                found = BEYOND_KNOWN
            elif start + count > max_model_len:
                found = BEYOND_TABLE
            marks[slot] = serial
        if found < fault:
            fault = found
            at = i
    return fault, at


@_jit
def needed_blocks(rows, req, blk, table, width, size, group, copied):
    """Blocks of one group that the rows need: growth of their tables and copies of shared tails.

    The last holder of a shared tail keeps it, so copies are counted per block in `copied` int32 [blocks], which is
    zero before and after.
    """
    needed = 0
    tails = 0
    for i in range(len(rows)):
        slot, start = rows[i, 0], rows[i, 2]
        held = req[slot, GROUP_FIELDS + GROUP_STRIDE * group]
        needed += _pages_for(start + rows[i, 3], held, size) - held
        page = _page_of(start, held, size)
        if page < held and start != page * size:
            block = table[slot * width + page]
            if blk[block, REF] == 1 and blk[block, NODE] == 0:
                continue
            tails += 1
            if blk[block, REF] - blk[block, PINS] - copied[block] > 1 or blk[block, NODE] != 0:
                copied[block] += 1
                needed += 1
    if tails > 0:
        for i in range(len(rows)):
            if rows[i, 2] // size < req[rows[i, 0], GROUP_FIELDS + GROUP_STRIDE * group]:
                copied[table[rows[i, 0] * width + rows[i, 2] // size]] = 0
    return needed


@_jit
def grow_tables(
    rows, req, blk, table, width, cells, count, size, group, fresh, scrub, copies, spaces, sums, tally
):
    """Gives the rows their blocks; (scrubbed, copies). fresh int64 [needed, 2] becomes (block, generation) in row
    order, a copied tail's target first; copies int64 [needed, 3] becomes (source, target, rows).
    """
    taken = 0
    scrubbed = 0
    copied = 0
    field = GROUP_FIELDS + GROUP_STRIDE * group
    for i in range(len(rows)):
        slot, start = rows[i, 0], rows[i, 2]
        held = req[slot, field]
        last = _pages_for(start + rows[i, 3], held, size)
        first = _page_of(start, held, size)
        tail = False
        if first < held and start != first * size:
            block = table[slot * width + first]
            tail = blk[block, REF] - blk[block, PINS] > 1 or blk[block, NODE] != 0
        if not tail:
            if last == held:
                continue
            first = held
        weight = _weight(spaces[3], slot)
        other = _other(weight)
        for page in range(first, last):
            if page > first and page < held:
                continue
            at = slot * width + page
            source = np.int64(table[at])
            block, foreign = _take(blk, cells, count - 1 - taken, req[slot, SCOPE], spaces, sums, tally)
            _set_cell(table, at, block, spaces[2], sums, 0)
            fresh[taken, 0] = block
            fresh[taken, 1] = blk[block, GENERATION]
            taken += 1
            if foreign:
                scrub[scrubbed] = block
                scrubbed += 1
            if page < held:
                kept = start - page * size
                _set_rows(blk, block, kept, spaces, sums, tally)
                req[slot, field + SOURCE] = source + 1
                sums[2] += _word(source + 1) * _SALT_A[field + SOURCE] * weight
                sums[3] += _word(source + 1) * _SALT_B[field + SOURCE] * other
                _pin_source(blk, source, _ONE, spaces, sums)
                copies[copied, 0] = source
                copies[copied, 1] = block
                copies[copied, 2] = kept
                copied += 1
        if last > held:
            req[slot, field] = last
            sums[0] += _word(last - held) * _SALT_A[field] * weight
            sums[1] += _word(last - held) * _SALT_B[field] * other
    return scrubbed, copied


@_jit
def pin_rows(rows, req, step, spaces, sums):
    """Marks every request of the step as in flight."""
    flight = step + 1
    for i in range(len(rows)):
        slot, count = rows[i, 0], rows[i, 3]
        change_a = _word(flight) * _SALT_A[FLIGHT_STEP] + _word(i + 1) * _SALT_A[FLIGHT_ROW]
        change_b = _word(flight) * _SALT_B[FLIGHT_STEP] + _word(i + 1) * _SALT_B[FLIGHT_ROW]
        change_a += _word(count) * _SALT_A[FLIGHT_COUNT]
        change_b += _word(count) * _SALT_B[FLIGHT_COUNT]
        if req[slot, DISPATCHED] == 0:
            req[slot, DISPATCHED] = 1
            change_a += _SALT_A[DISPATCHED]
            change_b += _SALT_B[DISPATCHED]
        req[slot, FLIGHT_STEP] = flight
        req[slot, FLIGHT_ROW] = i + 1
        req[slot, FLIGHT_COUNT] = count
        weight = _weight(spaces[3], slot)
        sums[2] += change_a * weight
        sums[3] += change_b * _other(weight)


@_jit
def read_outcomes(slots, req, samples, discarded, outcome):
    """Fills outcome int64 [rows] with DISCARDED, UNSAMPLED or a token; (fault, index into the faulty list)."""
    rows = len(slots)
    for i in range(rows):
        outcome[i] = UNSAMPLED
    for i in range(len(discarded)):
        row = discarded[i]
        if row < 0 or row >= rows:
            return BAD_DISCARD, i
        if outcome[row] == DISCARDED:
            return BAD_DISCARD, i
        outcome[row] = DISCARDED
    fault = COMPLETES
    at = 0
    for i in range(len(samples)):
        row, token = samples[i, 0], samples[i, 1]
        if row < 0 or row >= rows:
            return BAD_SAMPLE_ROW, i
        if outcome[row] >= 0:
            return BAD_SAMPLE_ROW, i
        found = COMPLETES
        if token < 0 or token > _LARGEST_TOKEN:
            found = BAD_TOKEN
        elif outcome[row] == DISCARDED:
            found = SAMPLED_DISCARD
        else:
            slot = slots[row]
            if req[slot, VALID] + req[slot, FLIGHT_COUNT] != req[slot, NUM_TOKENS]:
                found = SAMPLE_OUT_OF_ORDER
            outcome[row] = token
        if found < fault:
            fault = found
            at = i
    return fault, at


@_jit
def fill_blocks(slots, outcome, req, blk, table, width, size, group, sources, spaces, sums, tally):
    """Rows of kept spans become valid in one group's blocks; sources of copies are listed; how many."""
    num_sources = 0
    field = GROUP_FIELDS + GROUP_STRIDE * group
    for i in range(len(slots)):
        slot = slots[i]
        source = req[slot, field + SOURCE]
        if source != 0:
            sources[num_sources] = source - 1
            num_sources += 1
            _pin_source(blk, source - 1, _MINUS_ONE, spaces, sums)
            req[slot, field + SOURCE] = 0
            weight = _weight(spaces[3], slot)
            sums[2] -= _word(source) * _SALT_A[field + SOURCE] * weight
            sums[3] -= _word(source) * _SALT_B[field + SOURCE] * _other(weight)
        if outcome[i] == DISCARDED:
            continue
        start = req[slot, VALID]
        end = start + req[slot, FLIGHT_COUNT]
        page = _page_of(start, req[slot, field], size)
        while page * size < end:
            block = table[slot * width + page]
            _set_rows(blk, block, min(end - page * size, size), spaces, sums, tally)
            page += 1
    return num_sources


@_callee
def _left_blocks(req, slot, end, size, window):
    """Blocks that lie wholly before the last `window` rows of [0, end), of valid rows and of what a queued cut keeps."""
    end = min(end, req[slot, VALID])
    if req[slot, CUT] != 0:
        end = min(end, req[slot, CUT] - 2)
    return max(end - window, 0) // size


@_jit
def leaving_blocks(slots, ends, req, size, window, group):
    """How many blocks of one group `slide_windows` would leave behind."""
    count = 0
    field = GROUP_FIELDS + GROUP_STRIDE * group
    for i in range(len(slots)):
        if req[slots[i], ACTIVE] != 0:
            last = _left_blocks(req, slots[i], ends[i], size, window)
            count += max(last - req[slots[i], field + FIRST], 0)
    return count


@_jit
def slide_windows(slots, ends, req, table, width, size, window, group, gone, spaces, sums):
    """Leaves behind the blocks of one group that lie wholly before the windows ending at rows `ends` int64 [slots];
    they are listed in `gone`, as many as `leaving_blocks` says. A slot that is free by now has none.
    """
    count = 0
    field = GROUP_FIELDS + GROUP_STRIDE * group
    for i in range(len(slots)):
        slot = slots[i]
        first = req[slot, field + FIRST]
        last = _left_blocks(req, slot, ends[i], size, window)
        if req[slot, ACTIVE] == 0 or last <= first:
            continue
        for page in range(first, last):
            at = slot * width + page
            gone[count] = table[at]
            count += 1
            _set_cell(table, at, GONE, spaces[2], sums, 0)
        req[slot, field + FIRST] = last
        weight = _weight(spaces[3], slot)
        sums[0] += _word(last - first) * _SALT_A[field + FIRST] * weight
        sums[1] += _word(last - first) * _SALT_B[field + FIRST] * _other(weight)


@_jit
def finish_rows(slots, outcome, req, tokens, weights, alignment, sealed, spaces, sums):
    """Valid rows, samples and pins of a completed step; how many of its requests have something queued."""
    queued = 0
    for i in range(len(slots)):
        slot = slots[i]
        valid, count = req[slot, VALID], req[slot, FLIGHT_COUNT]
        step, row = _word(req[slot, FLIGHT_STEP]), _word(req[slot, FLIGHT_ROW])
        gone_a = (
            step * _SALT_A[FLIGHT_STEP] + row * _SALT_A[FLIGHT_ROW] + _word(count) * _SALT_A[FLIGHT_COUNT]
        )
        gone_b = (
            step * _SALT_B[FLIGHT_STEP] + row * _SALT_B[FLIGHT_ROW] + _word(count) * _SALT_B[FLIGHT_COUNT]
        )
        weight = _weight(spaces[3], slot)
        other = _other(weight)
        sums[2] -= gone_a * weight
        sums[3] -= gone_b * other
        req[slot, FLIGHT_STEP] = 0
        req[slot, FLIGHT_ROW] = 0
        req[slot, FLIGHT_COUNT] = 0
        if req[slot, ENDING] != 0 or req[slot, CUT] != 0:
            queued += 1
        sealed[i] = 0
        if outcome[i] == DISCARDED:
            continue
        over = valid % alignment + count
        if over >= alignment:
            sealed[i] = over // alignment
        req[slot, VALID] = valid + count
        change_a = _word(count) * _SALT_A[VALID]
        change_b = _word(count) * _SALT_B[VALID]
        if outcome[i] >= 0:
            at = req[slot, NUM_TOKENS]
            term = (_word(outcome[i]) + _ONE) * weights[at]
            tokens[slot, at] = outcome[i]
            req[slot, NUM_TOKENS] = at + 1
            req[slot, TOKEN_PRINT] = np.int64(_word(req[slot, TOKEN_PRINT]) + term)
            change_a += _SALT_A[NUM_TOKENS] + term * _SALT_A[TOKEN_PRINT]
            change_b += _SALT_B[NUM_TOKENS] + term * _SALT_B[TOKEN_PRINT]
        sums[0] += change_a * weight
        sums[1] += change_b * other
    return queued


# Requests and edges as wholes: one call where a command touches all blocks of one group.


@_jit
def admit_blocks(blk, table, first, shared, cells, count, scope, present, fresh, scrub, spaces, sums, tally):
    """Leases `shared` int64 [n] and takes free blocks for the rest of a table's row, which begins at cell `first`.

    present int64 [n, 2] and fresh int64 [m, 2] become (block, generation); how many blocks lie in `scrub`.
    """
    for i in range(len(shared)):
        block = shared[i]
        _lease(blk, block, spaces, sums, tally)
        present[i, 0] = block
        present[i, 1] = blk[block, GENERATION]
        _set_cell(table, first + i, block, spaces[2], sums, 0)
    scrubbed = 0
    at = first + len(shared)
    for i in range(len(fresh)):
        block, foreign = _take(blk, cells, count - 1 - i, scope, spaces, sums, tally)
        fresh[i, 0] = block
        fresh[i, 1] = blk[block, GENERATION]
        _set_cell(table, at + i, block, spaces[2], sums, 0)
        if foreign:
            scrub[scrubbed] = block
            scrubbed += 1
    return scrubbed


@_jit
def release_blocks(blk, table, first, held, path, cells, count, revoked, scrub, spaces, sums, tally):
    """Drops a table's row of `held` blocks, and those blocks of the leased `path` that are not in it.

    What becomes free goes on the stack, the first one taken next; (freed, evictable, how many lie in `scrub`).
    """
    private = 0
    for i in range(len(path)):
        if path[i] != table[first + i]:
            private += 1
    freed = np.empty(held + private, np.int64)
    num_freed = 0
    evictable = 0
    j = 0
    for i in range(held + private):
        if i < held:
            block = np.int64(table[first + i])
        else:
            while path[j] == table[first + j]:
                j += 1
            block = path[j]
            j += 1
        last, indexed = _drop(blk, block, spaces, sums, tally)
        if last and not indexed:
            freed[num_freed] = block
            num_freed += 1
        elif last:
            evictable += 1
    scrubbed = 0
    for i in range(num_freed):
        block = freed[i]
        if _disown(blk, block, revoked, spaces, sums):
            scrub[scrubbed] = block
            scrubbed += 1
        _set_cell(cells, count + num_freed - 1 - i, block + 1, spaces[1], sums, 2)
    for i in range(first, first + held):
        _set_cell(table, i, 0, spaces[2], sums, 0)
    return num_freed, evictable, scrubbed


@_jit
def evict_blocks(blk, blocks, cells, count, revoked, spaces, sums, tally):
    """Unlists indexed blocks without a reference and frees them, the first one taken next; those of revoked owners."""
    strange = 0
    last = count + len(blocks) - 1
    for i in range(len(blocks)):
        block = blocks[i]
        rows, node, entry = blk[block, ROWS], blk[block, NODE], blk[block, ENTRY]
        place = blk[block, PLACE]
        blk[block, PLACE] = 0
        blk[block, ROWS] = 0
        blk[block, NODE] = 0
        blk[block, ENTRY] = 0
        blk[block, GENERATION] += 1
        weight = _weight(spaces[0], block)
        other = _other(weight)
        sums[0] -= (_word(rows) * _SALT_A[ROWS] + _word(entry) * _SALT_A[ENTRY]) * weight
        sums[1] -= (_word(rows) * _SALT_B[ROWS] + _word(entry) * _SALT_B[ENTRY]) * other
        sums[2] += (
            _SALT_A[GENERATION] - _word(node) * _SALT_A[NODE] - _word(place) * _SALT_A[PLACE]
        ) * weight
        sums[3] += (_SALT_B[GENERATION] - _word(node) * _SALT_B[NODE] - _word(place) * _SALT_B[PLACE]) * other
        tally[_class(blk[block, REF], rows, node)] -= 1
        tally[_class(blk[block, REF], 0, 0)] += 1
        if revoked[blk[block, OWNER]]:
            strange += 1
        _set_cell(cells, last - i, block + 1, spaces[1], sums, 2)
    return strange


@_jit
def retire_nodes(records, nodes, generation, num_children, end_sum, cells, count, space, cells_space, sums):
    """Empties the records of nodes int64 [n] under a new generation and frees their ids, the first one taken next.

    `generation` is the field of that name; all fields are the machine digest's.
    """
    last = count + len(nodes) - 1
    for i in range(len(nodes)):
        node = nodes[i]
        weight = _weight(space, node)
        other = _other(weight)
        for field in range(records.shape[1]):
            old = records[node, field]
            new = old + 1 if field == generation else 0
            change = _word(new) - _word(old)
            records[node, field] = new
            sums[2] += change * _SALT_A[field] * weight
            sums[3] += change * _SALT_B[field] * other
        num_children[node] = 0
        end_sum[node] = 0
        _set_cell(cells, last - i, node + 1, cells_space, sums, 2)


@_jit
def open_node(records, parent, start, pages, scope, cells, top, spaces, sums):
    """Takes the id in cell `top` of the free stack and fills its record, whose fields are zero but for the generation.

    `spaces` uint64 [2]: those of the records and of the stack.
    """
    node = np.int64(cells[top]) - 1
    _set_cell(cells, top, 0, spaces[1], sums, 2)
    records[node, 0] = parent
    records[node, 1] = start
    records[node, 2] = pages
    records[node, 3] = scope
    change_a = _word(parent) * _SALT_A[0] + _word(start) * _SALT_A[1]
    change_b = _word(parent) * _SALT_B[0] + _word(start) * _SALT_B[1]
    change_a += _word(pages) * _SALT_A[2] + _word(scope) * _SALT_A[3]
    change_b += _word(pages) * _SALT_B[2] + _word(scope) * _SALT_B[3]
    weight = _weight(spaces[0], node)
    sums[2] += change_a * weight
    sums[3] += change_b * _other(weight)
    return node


@_jit
def close_record(records, index, fields, lanes, cells, count, space, cells_space, sums):
    """Zeroes fields of one record and gives its id back, to be taken next."""
    weight = _weight(space, index)
    other = _other(weight)
    for i in range(len(fields)):
        field = fields[i]
        old = _word(records[index, field])
        records[index, field] = 0
        sums[lanes[field]] -= old * _SALT_A[field] * weight
        sums[lanes[field] + 1] -= old * _SALT_B[field] * other
    _set_cell(cells, count, index + 1, cells_space, sums, 2)


@_jit
def open_request(records, fields, values, lanes, tokens, rows, weights, cells, top, spaces, sums):
    """Takes the slot in cell `top` of the free stack, copies its tokens and fills its record; the slot.

    `values` [fields] begin with those of ACTIVE, ...; TOKEN_PRINT and SLOT_GENERATION are made here. `spaces` uint64 [2]: those
    of the records and of the stack.
    """
    slot = np.int64(cells[top]) - 1
    _set_cell(cells, top, 0, spaces[1], sums, 2)
    total = np.uint64(0)
    for i in range(len(tokens)):
        rows[slot, i] = tokens[i]
        total += (_word(tokens[i]) + _ONE) * weights[i]
    values[TOKEN_PRINT] = np.int64(total)
    values[SLOT_GENERATION] = records[slot, SLOT_GENERATION] + 1
    weight = _weight(spaces[0], slot)
    other = _other(weight)
    for i in range(len(fields)):
        field = fields[i]
        change = _word(values[i]) - _word(records[slot, field])
        records[slot, field] = values[i]
        sums[lanes[field]] += change * _SALT_A[field] * weight
        sums[lanes[field] + 1] += change * _SALT_B[field] * other
    return slot
