/* What the processor has and the system saves: asked before code runs that not every processor can run. */
#ifndef STRATAGATE_PROCESSOR_H
#define STRATAGATE_PROCESSOR_H

#if defined(__x86_64__)
#include <cpuid.h>

/* Of leaf 7: ebx, ecx, edx. */
#define HAS_AVX512F (1u << 16)
#define HAS_AVX512BW (1u << 30)
#define HAS_AVX512VL (1u << 31)
#define HAS_AVX512_VNNI (1u << 11)
#define HAS_AMX_TILE (1u << 24)
#define HAS_AMX_INT8 (1u << 25)

/* Registers: of SSE, AVX and AVX-512; tiles beside them. */
#define SAVES_WIDE 0xe6u
#define SAVES_TILES 0x600e6u

static inline int processor_has(unsigned ebx, unsigned ecx, unsigned edx, unsigned saved) {
    unsigned a, b, c, d, low, high;
    /* Without OSXSAVE the system saves no extended state, and what tells of it is no instruction. */
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 27))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & saved) != saved || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return 0;
    return !(~b & ebx) && !(~c & ecx) && !(~d & edx);
}
#endif

#endif
