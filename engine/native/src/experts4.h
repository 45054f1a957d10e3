/* 4-bit experts of the GPU's (engine/cuda/quant.py packs them), to the bit as engine/cuda/digits.py and engine/cuda/moe.py
 * compute them: rows become two int8 digits per value, sums of a run of columns are whole numbers, and runs are added up
 * in their order with one rounding of each operation. */
#ifndef STRATAGATE_EXPERTS4_H
#define STRATAGATE_EXPERTS4_H

#include <stdint.h>

#define GROUP 128
#define HALF (GROUP / 2)
#define QUARTER (GROUP / 4)
#define TILE 64         /* output rows that lie together */
#define ROWS_AT_ONCE 16 /* input rows of one tile's product */
#define AHEAD 4096      /* bytes of weights that are asked for before they are needed */

/* Matrices one behind another: [tiles][groups][TILE] rows of a group, HALF bytes of two nibbles each, and a bf16 scale. */
typedef struct {
    const uint8_t *words;
    const uint16_t *scales;
    int32_t groups, tiles;
} Packed4;

/* One row's digits in the order of the nibbles that they are multiplied with; of each run its unit over 16, and 8 times
 * the sum of its values in units, which is what weights count too much when they are read as 0 to 15. */
typedef struct {
    int8_t *low, *high;
    float *units;
    int32_t *excess;
} Row;

/* y[r][TILE] of one tile, whose words and scales begin there, for up to ROWS_AT_ONCE rows; runs of a group: 1 or 2. */
typedef void TileProduct(const uint8_t *words, const uint16_t *scales, int groups, int runs, const Row *const *rows,
                         int num_rows, float *y);

TileProduct tile_product_narrow;
/* With the processor's products of bytes in vectors of 64 where it has them, else the narrow one: the same bits. */
TileProduct *widest_tile_product(void);

#endif
