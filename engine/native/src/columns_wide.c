#include "columns.h"
#include "processor.h"

#if defined(__x86_64__)
/* Headers of the compiler come before the pragma, which is for what is written here. */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f")
#endif
#define LANES 16
#define COLUMNS wide_columns
#include "columns_code.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const Columns *widest_columns(void) {
    return processor_has(HAS_AVX512F, 0, 0, SAVES_WIDE) ? &wide_columns : &narrow_columns;
}

#else

const Columns *widest_columns(void) { return &narrow_columns; }

#endif
