/* Products of int8 weights by a processor's tile unit (Intel AMX): rows in fixed point, sums of integers.
 *
 * A row is one scale times whole numbers of three balanced digits to the base 256, so its digits multiply int8 codes
 * without rounding: whatever the order, the tiles and the other rows, the sums are the same. */
#ifndef STRATAGATE_TILES_H
#define STRATAGATE_TILES_H

#include <stdint.h>

#include "product.h"

#define GROUP_ROWS 5  /* rows whose digits fill a tile: 15 of its 16 rows */
#define TILE_ROWS 15
#define TILE_VALUES 64 /* of k in a tile */
#define SCALE_BYTES 64 /* a group begins with its rows' scales */

/* More products of a digit (at most 128) and a code (128) might not fit an int32 sum. */
#define MAX_TILE_K 131071

/* Whether this processor, its operating system and this process may use tiles; asks for the permission. */
int tiles_available(void);

/* Floats that the digits of so many rows of k values take. */
static inline int64_t digits_floats(int64_t num_rows, int64_t k) {
    int64_t blocks = (k + TILE_VALUES - 1) / TILE_VALUES;
    return (num_rows + GROUP_ROWS - 1) / GROUP_ROWS * (SCALE_BYTES + blocks * TILE_ROWS * TILE_VALUES) / 4;
}

/* Digits of a buffer's rows [.., k]; a buffer begins with a cache line, or is NULL and holds none. */
static inline Digits digits_of(float *buffer, int k) {
    return (Digits){(int8_t *)buffer, k, (k + TILE_VALUES - 1) / TILE_VALUES};
}

/* Writes a row, if the digits have a buffer. The scale of a row with a value that is not finite is not a number, and so
 * are its products. */
void digits_write(Digits to, int row, const float *x);
void digits_copy(Digits to, int row, Digits from, int from_row);

/* Panels [first, end) of a KIND_TILES weight. Its last tile may reach up to 960 bytes beyond it: they are multiplied by
 * zeros, but must be there. */
void tiles_multiply(const Matrix *w, Digits x, Rows y, int num_rows, int first, int end);

#endif
