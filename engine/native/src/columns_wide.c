#include "columns.h"

#if defined(__x86_64__)
/* Headers of the compiler come before the pragma, which is for what is written here. */
#include <cpuid.h>
#include <immintrin.h>
#include <math.h>
#include <string.h>

static int wide_available(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 27))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    /* The system saves the registers of SSE, AVX and AVX-512. */
    return (low & 0xe6) == 0xe6 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && b & 1u << 16;
}

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

const Columns *widest_columns(void) { return wide_available() ? &wide_columns : &narrow_columns; }

#else

const Columns *widest_columns(void) { return &narrow_columns; }

#endif
