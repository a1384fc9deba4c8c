/* What the C sources share: element types and their conversion to float, prefetching, and how threads share work.
 *
 * Plain C over addresses, free of Python's and torch's ABI. The arithmetic is written once, in loops that the compiler
 * vectorises, and compiled once per instruction set; the caller says which to run. Contraction is off and every fused
 * multiply-add is written out, so all variants give the same bits.
 *
 * Work is cut into units of UNIT elements that never cross a tensor. Sums are kept per unit and added in unit order, so
 * they do not depend on the number of threads; sums within a unit run over LANES fixed lanes, so they do not depend on
 * the width of a register either.
 */
#ifndef TAILOPT_ELEMENTS_H
#define TAILOPT_ELEMENTS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif
#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif
#if defined(__GNUC__) && defined(__x86_64__)
#define X86 1
#endif
#if defined(__GNUC__) && !defined(_WIN32)
#define HIDDEN __attribute__((visibility("hidden")))
#else
#define HIDDEN
#endif

enum { F32, F64, BF16, F16 };       /* as calls.py numbers them */
enum { PORTABLE, AVX2, AVX512, VARIANTS }; /* instruction sets, best last */
enum { UNIT = 65536, LANES = 8, LINE = 64 };
enum { SERIAL = 131072 };           /* fewer elements than this are not worth waking a thread */

/* Fill the tables of clip.c and flat.c; once, before the first pass. */
HIDDEN void prepare_logarithms(void);
HIDDEN void prepare_checksum_keys(void);

INLINE int64_t size_of(int dtype) { return dtype == F32 ? 4 : dtype == F64 ? 8 : 2; }

/* ---- 16-bit formats: widened to float for the arithmetic, rounded to nearest even at the store ---- */

INLINE float from_bits(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }
INLINE uint32_t to_bits(float f) { uint32_t b; memcpy(&b, &f, 4); return b; }

/* The rounded value is the upper half of the sum. NaN needs no care: those that reach this point come from bf16 or from the
 * processor, their lower half is 0, and no carry can turn them into something else. */
INLINE uint32_t bf16_round(float f) {
    uint32_t b = to_bits(f);
    return b + (0x7fffu + ((b >> 16) & 1u));
}

INLINE float f16_widen(uint16_t h) {
    uint32_t magnitude = (uint32_t)(h & 0x7fffu) << 13;
    /* moving the exponent by a multiplication also normalises denormals; infinities and NaN keep a full exponent */
    uint32_t b = to_bits(from_bits(magnitude) * 0x1p112f);
    b = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : b;
    return from_bits(b | (uint32_t)(h & 0x8000u) << 16);
}

INLINE uint16_t f16_narrow(float f) {
    uint32_t b = to_bits(f), magnitude = b & 0x7fffffffu, sign = (b >> 16) & 0x8000u;
    /* normal range: rebias and round the 13 lost bits; the carry may reach infinity, as it should */
    uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    /* below 2^-14: adding 0.5 lines the denormal's last bit up with float's, and the addition rounds */
    uint32_t small = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t h = magnitude < 0x38800000u ? small : normal;
    h = magnitude >= 0x47800000u ? 0x7c00u : h;
    h = magnitude > 0x7f800000u ? 0x7e00u : h;
    return (uint16_t)(h | sign);
}

INLINE void widen(int dtype, const char *g, int64_t n, float *out) {
    const uint16_t *h = (const uint16_t *)(const void *)g;
    if (dtype == BF16) for (int64_t i = 0; i < n; i++) out[i] = from_bits((uint32_t)h[i] << 16);
    else if (dtype == F16) for (int64_t i = 0; i < n; i++) out[i] = f16_widen(h[i]);
    else
        for (int64_t i = 0; i < n; i++) { /* for the histogram: exponent and mantissa cut to a float's, not rounded */
            uint64_t b;
            memcpy(&b, (const double *)(const void *)g + i, 8);
            const int64_t e = (int64_t)(b >> 52 & 2047), octave = e == 2047 ? 255 : e < 896 ? 0 : e > 1150 ? 254 : e - 896;
            out[i] = from_bits((uint32_t)octave << 23 | (uint32_t)(b >> 29 & 0x7fffffu));
        }
}

/* Looking an address of a new page up takes longer than reading a page, most of all in a virtual machine, and the processor
 * fetches ahead within pages only. So one line of the page PAGES later is asked for at every page. Time of the update alone,
 * 24M elements on two cores of a virtual machine, in one run: 1 without asking, 0.92 where only what is near is asked for,
 * 0.85 with this; 12 to 32 KiB ahead did equally well, 128 KiB was too early. Asking beyond the end of an array is allowed
 * and does nothing. */
enum { PAGE = 4096, PAGES = 4 };
INLINE void next_page(const void *x) {
#if defined(__GNUC__)
    __builtin_prefetch((const char *)x + PAGES * PAGE);
#endif
}

/* The next unit that no thread has taken yet. */
INLINE int64_t claim(int64_t *next) {
    int64_t mine;
#ifdef _OPENMP
#pragma omp atomic capture
#endif
    mine = (*next)++;
    return mine;
}

#endif
