/* What the loader asks: the version, whether there are threads, and which instruction sets this processor can run. */
#include "elements.h"

/* Raised whenever the meaning of an argument changes: the loader refuses a library of another version. */
#define VERSION 3

EXPORT int tailopt_version(void) { return VERSION; }

EXPORT int tailopt_openmp(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

EXPORT void tailopt_prepare(void) { /* once, before the first pass */
    prepare_logarithms();
    prepare_checksum_keys();
}

/* The name of variant i, or NULL past the last one this processor can run. */
EXPORT const char *tailopt_variant(int i) {
    static const char *const NAMES[VARIANTS] = {"portable", "avx2", "avx512"};
#ifdef X86
    if (i < PORTABLE || i >= VARIANTS) return NULL;
    __builtin_cpu_init();
    if (i == AVX2 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return NULL;
    if (i == AVX512 && !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))) return NULL;
#else
    if (i != PORTABLE) return NULL;
#endif
    return NAMES[i];
}
