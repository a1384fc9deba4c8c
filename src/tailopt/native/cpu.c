/* The CPU kernel: one pass over many tensors, one parallel region a step.
 *
 *     p <- fma(-lr, clip(g), p * decay)            (reference.py says it in torch)
 *
 * Plain C over addresses, free of Python's and torch's ABI. The arithmetic is written once, in loops that the
 * compiler vectorises, and compiled once per instruction set (`VARIANT` below); the caller says which to run. Contraction
 * is off and every fused multiply-add is written, so all variants give the same bits.
 *
 * Work is cut into units of UNIT elements that never cross a tensor. Sums are kept per unit and added in unit order, so
 * they do not depend on the number of threads; sums within a unit run over LANES fixed lanes, so they do not depend on
 * the width of a register either.
 */
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

/* Raised whenever the meaning of an argument changes: the loader refuses a library of another version. */
#define VERSION 3

enum { F32, F64, BF16, F16 };       /* as cpu.py numbers them */
enum { BICLIP, RESCALE, COUNT };    /* clip by coordinate; (g*s/n)*t; count only */
enum { UNIT = 65536, LANES = 8, LINE = 64, STRIDE = 32, BINS = 256 };
enum { SERIAL = 131072 };           /* fewer elements than this are not worth waking a thread */

typedef struct { double neg_lr, decay, maximize, u, d, dead_zone, scale, norm, target; } Row;
typedef struct { int64_t elements, zero, below, above, nonfinite; double squares, largest; } Tally;
typedef struct {
    int op, dtype;
    int64_t count;
    int phase;                      /* which of STRIDE lines to sample; -1: all */
    void *p;
    const void *g;
    const Row *row;
    Tally *tally;                   /* NULL: do not count */
    uint64_t *bins;                 /* NULL: no histogram; a bin is count << 40 | sum of log2 fractions, 16 bits each */
} Unit;

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

/* ---- one element; the order of the comparisons lets NaN through ---- */

#define ELEMENT(REAL, BITS, SUFFIX, FMA)                                                                             \
    typedef struct { REAL neg_lr, decay, u, d, dead_zone, scale, norm, target; int maximize; } Row_##SUFFIX;        \
    INLINE Row_##SUFFIX row_##SUFFIX(const Row *r) { /* each number rounded once */                                 \
        Row_##SUFFIX s = {(REAL)r->neg_lr, (REAL)r->decay, (REAL)r->u, (REAL)r->d, (REAL)r->dead_zone,              \
                          (REAL)r->scale, (REAL)r->norm, (REAL)r->target, r->maximize != 0};                        \
        return s;                                                                                                   \
    }                                                                                                               \
    INLINE REAL biclip_##SUFFIX(REAL p, REAL g, const Row_##SUFFIX *r, int maximize) {                              \
        const BITS sign = (BITS)1 << (8 * sizeof(BITS) - 1);                                                        \
        BITS bits, clipped;                                                                                         \
        REAL a, c;                                                                                                  \
        memcpy(&bits, &g, sizeof g);                                                                                \
        clipped = bits & ~sign;                                                                                     \
        memcpy(&a, &clipped, sizeof a);                                                                             \
        c = a < r->d ? r->d : a;                                                                                    \
        c = c > r->u ? r->u : c;                                                                                    \
        memcpy(&clipped, &c, sizeof c);                                                                             \
        clipped |= (maximize ? ~bits : bits) & sign;                                                                \
        clipped = a <= r->dead_zone ? 0 : clipped;                                                                  \
        memcpy(&c, &clipped, sizeof c);                                                                             \
        return FMA(r->neg_lr, c, p * r->decay);                                                                     \
    }                                                                                                               \
    INLINE REAL rescale_##SUFFIX(REAL p, REAL g, const Row_##SUFFIX *r, int maximize) {                             \
        REAL c = (maximize ? -g : g) * r->scale / r->norm * r->target + (REAL)0; /* a zero moves nothing, not even -0 */ \
        return FMA(r->neg_lr, c, p * r->decay);                                                                     \
    }

ELEMENT(float, uint32_t, f32, fmaf)
ELEMENT(double, uint64_t, f64, fma)

/* ---- a run of elements ---- */

#define SWEEP(RULE, REAL, SUFFIX)                                                                                    \
    INLINE void RULE##_run_##SUFFIX(REAL *restrict p, const REAL *restrict g, int64_t n, const Row *row) {           \
        const Row_##SUFFIX r = row_##SUFFIX(row);                                                                   \
        if (r.maximize) for (int64_t i = 0; i < n; i++) p[i] = RULE##_##SUFFIX(p[i], g[i], &r, 1);                  \
        else for (int64_t i = 0; i < n; i++) p[i] = RULE##_##SUFFIX(p[i], g[i], &r, 0);                             \
    }
#define SWEEP_16(RULE)                                                                                               \
    /* two elements a 32-bit word: the halves become floats by a shift and a mask, without crossing lanes */        \
    INLINE void RULE##_words_bf16(uint16_t *restrict p, const uint16_t *restrict g, int64_t n, const Row_f32 *r, int maximize) { \
        for (int64_t i = 0; i < n / 2; i++) {                                                                       \
            uint32_t pw, gw;                                                                                        \
            memcpy(&pw, p + 2 * i, 4);                                                                              \
            memcpy(&gw, g + 2 * i, 4);                                                                              \
            float low = RULE##_f32(from_bits(pw << 16), from_bits(gw << 16), r, maximize);                          \
            float high = RULE##_f32(from_bits(pw & 0xffff0000u), from_bits(gw & 0xffff0000u), r, maximize);         \
            pw = bf16_round(low) >> 16 | (bf16_round(high) & 0xffff0000u);                                          \
            memcpy(p + 2 * i, &pw, 4);                                                                              \
        }                                                                                                           \
        if (n % 2) {                                                                                                \
            float p_last = from_bits((uint32_t)p[n - 1] << 16), g_last = from_bits((uint32_t)g[n - 1] << 16);        \
            p[n - 1] = (uint16_t)(bf16_round(RULE##_f32(p_last, g_last, r, maximize)) >> 16);                       \
        }                                                                                                           \
    }                                                                                                               \
    INLINE void RULE##_run_bf16(uint16_t *restrict p, const uint16_t *restrict g, int64_t n, const Row *row) {       \
        const Row_f32 r = row_f32(row);                                                                             \
        if (r.maximize) RULE##_words_bf16(p, g, n, &r, 1);                                                          \
        else RULE##_words_bf16(p, g, n, &r, 0);                                                                     \
    }                                                                                                               \
    INLINE void RULE##_run_f16(uint16_t *restrict p, const uint16_t *restrict g, int64_t n, const Row *row) {        \
        const Row_f32 r = row_f32(row);                                                                             \
        for (int64_t i = 0; i < n; i++)                                                                             \
            p[i] = f16_narrow(RULE##_f32(f16_widen(p[i]), f16_widen(g[i]), &r, r.maximize));                        \
    }

SWEEP(biclip, float, f32)
SWEEP(biclip, double, f64)
SWEEP_16(biclip)
SWEEP(rescale, float, f32)
SWEEP(rescale, double, f64)
SWEEP_16(rescale)

/* ---- counting: integers by plain reductions, squares by fixed lanes in double, the maximum by its bit pattern ---- */

#define TALLY(REAL, BITS, SUFFIX, MAGNITUDE, INFINITE, BEFORE)                                                       \
    INLINE void tally_##SUFFIX(const REAL *restrict x, int64_t n, const Row *row, Tally *t, double *lane) {          \
        const Row_##SUFFIX r = row_##SUFFIX(row);                                                                   \
        const REAL dead = r.dead_zone, low = r.d > dead ? r.d : dead, high = r.u > low ? BEFORE(r.u, (REAL)0) : low; \
        BITS zero = 0, below = 0, above = 0, largest = 0;                                                           \
        for (int64_t i = 0; i < n; i++) {                                                                           \
            BITS b;                                                                                                 \
            REAL a;                                                                                                 \
            memcpy(&b, x + i, sizeof b);                                                                            \
            b &= MAGNITUDE;                                                                                         \
            memcpy(&a, &b, sizeof a);                                                                               \
            zero += a <= dead;                                                                                      \
            below += a <= low;                                                                                      \
            above += a > high;                                                                                      \
            largest = b > largest ? b : largest;                                                                    \
        }                                                                                                           \
        t->elements += n, t->zero += zero, t->below += below - zero, t->above += above;                             \
        if (largest >= INFINITE) { /* rare: finite elements only, one by one, into the same lanes */                \
            for (int64_t i = 0; i < n; i++) {                                                                       \
                double a = fabs((double)x[i]);                                                                      \
                if (!(a < INFINITY)) t->nonfinite++;                                                                \
                else lane[i % LANES] = fma(a, a, lane[i % LANES]), t->largest = a > t->largest ? a : t->largest;    \
            }                                                                                                       \
            return;                                                                                                 \
        }                                                                                                           \
        REAL top;                                                                                                   \
        memcpy(&top, &largest, sizeof top);                                                                         \
        t->largest = top > t->largest ? top : t->largest;                                                           \
        int64_t i = 0;                                                                                              \
        for (; i + LANES <= n; i += LANES)                                                                          \
            for (int j = 0; j < LANES; j++) lane[j] = fma((double)x[i + j], (double)x[i + j], lane[j]);             \
        for (; i < n; i++) lane[i % LANES] = fma((double)x[i], (double)x[i], lane[i % LANES]);                      \
    }

TALLY(float, int32_t, f32, INT32_MAX, 0x7f800000, nextafterf)
TALLY(double, int64_t, f64, INT64_MAX, 0x7ff0000000000000, nextafter)

/* Bin = biased exponent of a float, an octave: 2^(bin-127) <= |x| < 2^(bin-126); bin 0 holds what is smaller, zeros too, bin
 * 255 what is not finite. log2 of the mantissa comes from a table by its first 10 bits (middle of the cell, 16 bits of
 * fraction): sums of integers have no order, so they repeat whatever the threads did. */
static uint16_t LOG2[1024];

/* A checksum is a sum over the 32-bit words of a stretch, modulo 2^64:
 *
 *     sum of word[i] * KEYS[i % PLACES] * page_key(i / PLACES)        i: the word's place in its stretch
 *
 * A word of 0 counts 0 wherever it is. Any change within one word is seen: the difference and its key are both below 2^32, so
 * their product is below 2^64 and not 0, and a page's key is odd. So is an exchange of two words of one page, since its keys
 * differ. Any other change is missed by one choice of the keys in about 2^31. The sum has no order: threads, registers and the
 * cuts between spans change no bit. */
enum { PLACES = 1024 };
static uint32_t KEYS[PLACES + 8]; /* the last 8 are read by registers that end beyond a page, and count for nothing */

INLINE uint64_t mixed(uint64_t i) { /* the i-th number of SplitMix64 */
    uint64_t z = (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

INLINE uint64_t page_key(uint64_t page) { return mixed(PLACES + page) | 1; }

EXPORT void tailopt_prepare(void) { /* once, before the first pass */
    for (int i = 0; i < 1024; i++) LOG2[i] = (uint16_t)(log2(1.0 + (i + 0.5) / 1024.0) * 65536.0 + 0.5);
    for (int i = 0; i < PLACES; i++) KEYS[i] = (uint32_t)(mixed((uint64_t)i) >> 32) | 1;
}

INLINE void histogram(const float *x, int64_t n, uint64_t *bins) {
    for (int64_t i = 0; i < n; i++) {
        const uint32_t b = to_bits(x[i]) & 0x7fffffffu;
        bins[b >> 23] += (uint64_t)1 << 40 | LOG2[(b >> 13) & 1023u];
    }
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

/* ---- a unit: in blocks of STRIDE cache lines, each updated, counted and sampled while it is in the first cache ---- */

INLINE int64_t size_of(int dtype) { return dtype == F32 ? 4 : dtype == F64 ? 8 : 2; }

INLINE void sample(const Unit *w, int64_t at, int64_t n, float *wide) {
    const int64_t size = size_of(w->dtype), line = LINE / size;
    const int64_t first = w->phase < 0 ? 0 : w->phase * line, end = w->phase < 0 ? n : first + line < n ? first + line : n;
    const char *g = (const char *)w->g + (at + first) * size;
    if (first >= end) return;
    if (w->dtype == F32) {
        histogram((const float *)g, end - first, w->bins);
    } else {
        widen(w->dtype, g, end - first, wide);
        histogram(wide, end - first, w->bins);
    }
}

INLINE void tally(const Unit *w, int64_t at, int64_t n, double *lane, float *wide) {
    const char *g = (const char *)w->g + at * size_of(w->dtype);
    if (w->dtype == F32) tally_f32((const float *)g, n, w->row, w->tally, lane);
    else if (w->dtype == F64) tally_f64((const double *)g, n, w->row, w->tally, lane);
    else {
        widen(w->dtype, g, n, wide);
        tally_f32(wide, n, w->row, w->tally, lane);
    }
}

INLINE void update(const Unit *w, int64_t at, int64_t n) {
    void *p = (char *)w->p + at * size_of(w->dtype);
    const void *g = (const char *)w->g + at * size_of(w->dtype);
    if (w->op == BICLIP) switch (w->dtype) {
        case F32: biclip_run_f32(p, g, n, w->row); break;
        case F64: biclip_run_f64(p, g, n, w->row); break;
        case BF16: biclip_run_bf16(p, g, n, w->row); break;
        default: biclip_run_f16(p, g, n, w->row);
    } else switch (w->dtype) {
        case F32: rescale_run_f32(p, g, n, w->row); break;
        case F64: rescale_run_f64(p, g, n, w->row); break;
        case BF16: rescale_run_bf16(p, g, n, w->row); break;
        default: rescale_run_f16(p, g, n, w->row);
    }
}

INLINE void fold(const double *lane, Tally *t) {
    double sum[LANES];
    memcpy(sum, lane, sizeof sum);
    for (int half = LANES / 2; half; half /= 2)
        for (int j = 0; j < half; j++) sum[j] += sum[j + half];
    t->squares = sum[0];
}

INLINE void unit(const Unit *w) {
    const int64_t size = size_of(w->dtype), block = (w->tally || w->bins ? STRIDE * LINE : PAGE) / size;
    double lane[LANES] = {0};
    float wide[STRIDE * LINE / 2];
    for (int64_t at = 0; at < w->count; at += block) {
        const int64_t n = w->count - at < block ? w->count - at : block;
        if (at * size % PAGE == 0) {
            next_page((const char *)w->g + at * size);
            if (w->op != COUNT) next_page((const char *)w->p + at * size);
        }
        if (w->tally) tally(w, at, n, lane, wide);
        if (w->bins) sample(w, at, n, wide);
        if (w->op != COUNT) update(w, at, n);
    }
    if (w->tally) fold(lane, w->tally);
}

/* ---- a round between nodes, fp32: what moved, what arrived and the mean, each in one pass ----
 *
 * In steps of at most NEAR elements, a page: the loops after the first find them in the first cache. A step ends where a page
 * of checksum keys does. The largest magnitude is that of the bit patterns, which has no order either. */
enum { NEAR = PAGE / 4 };

typedef struct { uint64_t sum; uint32_t largest; } Look;

/* How many of n elements the next step takes, if the first has this place in its stretch. */
INLINE int64_t step(int64_t place, int64_t n) {
    const int64_t rest = PLACES - place % PLACES;
    return n < rest ? n : rest;
}

/* A look at elements within one page of keys, of which the first has this place in its stretch; copied: with a copy. `to` is not
 * restrict: a compiler would take the copy out of the loop then, to read every page twice (1.8 times the time of a copy). */
INLINE void look_portable(const float *x, int64_t n, int64_t place, Look *seen, float *to, const int copied) {
    const uint32_t *key = KEYS + place % PLACES;
    uint64_t sum = 0;
    int32_t largest = 0;
    for (int64_t i = 0; i < n; i++) sum += (uint64_t)to_bits(x[i]) * key[i];
    for (int64_t i = 0; i < n; i++) {
        const int32_t b = (int32_t)(to_bits(x[i]) & 0x7fffffffu);
        largest = b > largest ? b : largest;
    }
    if (copied) memcpy(to, x, (size_t)n * sizeof *to);
    seen->sum += sum * page_key((uint64_t)(place / PLACES));
    seen->largest = (uint32_t)largest > seen->largest ? (uint32_t)largest : seen->largest;
}

typedef Look Looks_portable;
INLINE Look seen_portable(const Looks_portable *s) { return *s; }

/* Sum of share * row, one row after another with two roundings each, over whole. */
typedef struct { const uint64_t *rows; const float *shares; int nodes; float whole; } Sum;

INLINE void add_up(const Sum *s, int64_t at, int64_t m, float *restrict acc) {
    const float *row = (const float *)(uintptr_t)s->rows[0] + at, first = s->shares[0];
    for (int k = 0; k < s->nodes; k++) next_page((const float *)(uintptr_t)s->rows[k] + at);
    for (int64_t i = 0; i < m; i++) acc[i] = row[i] * first;
    for (int k = 1; k < s->nodes; k++) {
        const float share = s->shares[k];
        row = (const float *)(uintptr_t)s->rows[k] + at;
        for (int64_t i = 0; i < m; i++) acc[i] += row[i] * share;
    }
    if (s->whole != 1.0f) for (int64_t i = 0; i < m; i++) acc[i] /= s->whole;
}

/* The sum or its negative; out may be a row. */
INLINE void mean(const Sum *s, int negative, float *out, int64_t from, int64_t n) {
    float acc[NEAR];
    for (int64_t at = from; at < from + n; at += NEAR) {
        const int64_t m = from + n - at < NEAR ? from + n - at : NEAR;
        add_up(s, at, m, acc);
        if (negative) for (int64_t i = 0; i < m; i++) out[at + i] = -acc[i];
        else memcpy(out + at, acc, (size_t)m * sizeof *acc);
    }
}

/* Descent with g = -sum: v <- momentum * v + g, x <- x - lr * v, with Nesterov x <- x - lr * (g + momentum * v); without v,
 * x <- x - lr * g. fused: with the fused multiply-adds that torch has on this processor. */
typedef struct { float neg_lr, momentum; int nesterov, fused; } Descent;

INLINE void descend(const Sum *s, const Descent *h, float *restrict x, float *restrict v, int64_t from, int64_t n) {
    float g[NEAR];
    const float neg_lr = h->neg_lr, momentum = h->momentum;
    for (int64_t at = 0; at < n; at += NEAR) {
        const int64_t m = n - at < NEAR ? n - at : NEAR;
        float *restrict y = x + at, *restrict w = v ? v + at : NULL;
        next_page(y);
        if (w) next_page(w);
        add_up(s, from + at, m, g);
        for (int64_t i = 0; i < m; i++) g[i] = -g[i];
        if (w) {
            for (int64_t i = 0; i < m; i++) w[i] = w[i] * momentum + g[i];
            if (!h->nesterov) memcpy(g, w, (size_t)m * sizeof *g);
            else if (h->fused) for (int64_t i = 0; i < m; i++) g[i] = fmaf(w[i], momentum, g[i]);
            else for (int64_t i = 0; i < m; i++) g[i] = g[i] + w[i] * momentum;
        }
        if (h->fused) for (int64_t i = 0; i < m; i++) y[i] = fmaf(g[i], neg_lr, y[i]);
        else for (int64_t i = 0; i < m; i++) y[i] = y[i] + g[i] * neg_lr;
    }
}

/* ---- the guard: guard.py says it in torch, every rounding here is one of those ---- */

enum { BLOCK = 32768 };             /* elements whose squares are added up at once, as in blocks.py */

/* Of a type: the distance of 1 to the next number, and of 0. */
typedef struct { float eps, least; } Type;

INLINE Type type_of(int dtype) {
    const Type types[] = {{0x1p-23f, 0x1p-149f}, {0, 0}, {0x1p-7f, 0x1p-133f}, {0x1p-10f, 0x1p-24f}}; /* not for fp64 */
    return types[dtype];
}

/* The distance of a magnitude to the next larger number of a type. Of 0 and of what is not finite: half of eps, as from the
 * exponent that frexp gives them. */
INLINE float ulp(float x, Type t) {
    const uint32_t b = to_bits(x), exponent = b & 0x7f800000u;
    const float u = from_bits(exponent) * t.eps;
    const float clamped = u > t.least ? u : t.least;
    return b == 0 || exponent == 0x7f800000u ? t.eps / 2 : clamped;
}

typedef struct { float a, c, slack, ulps; Type type; } Limit;

/* How far a coordinate x may move: b (1 + slack) and some units in the last place of max(|x|, b), where b = a + c |x|. */
INLINE float allowed(float x, const Limit *l) {
    const float m = fabsf(x), b = l->a + l->c * m;
    return b * l->slack + l->ulps * ulp(m > b ? m : b, l->type);
}

/* By how much d is beyond; -1 where it is not. */
INLINE int32_t excess_bits(float d, float x, const Limit *l) {
    const float far = fabsf(d), most = allowed(x, l);
    return far > most ? (int32_t)to_bits(far - most) : -1;
}

/* The first of the elements that are farthest beyond; at < 0: none is. */
typedef struct { int64_t at; float excess, allowed; } Beyond;

INLINE void beyond(const float *d, const char *x, int dtype, int64_t n, const Limit *limit, Beyond *worst) {
    const Limit l = *limit;
    float wide[NEAR];
    for (int64_t at = 0; at < n; at += NEAR) {
        const int64_t m = n - at < NEAR ? n - at : NEAR;
        const float *e = d + at, *y = wide;
        next_page(e), next_page(x + at * size_of(dtype));
        if (dtype == F32) y = (const float *)(const void *)x + at;
        else widen(dtype, x + at * 2, m, wide);
        int32_t top = -1; /* the bits of the largest excess: those of numbers that are not negative are in their order */
        for (int64_t i = 0; i < m; i++) {
            const int32_t excess = excess_bits(e[i], y[i], &l);
            top = excess > top ? excess : top;
        }
        if (top < 0 || (worst->at >= 0 && from_bits((uint32_t)top) <= worst->excess)) continue;
        int64_t i = 0;
        while (excess_bits(e[i], y[i], &l) != top) i++;
        worst->at = at + i, worst->excess = from_bits((uint32_t)top), worst->allowed = allowed(y[i], &l);
    }
}

/* The sum of squares of the units in the last place of max(|x|, b), of one block. They are powers of 2, so it is exact in any
 * order while they span few octaves; -1 where they do not. */
INLINE double ulp_squares(const char *x, int dtype, int64_t n, float b) {
    const Type type = type_of(dtype);
    double lane[LANES] = {0}, sum = 0;
    float wide[NEAR];
    int32_t low = INT32_MAX, high = 0;
    for (int64_t at = 0; at < n; at += NEAR) {
        const int64_t m = n - at < NEAR ? n - at : NEAR;
        next_page(x + at * size_of(dtype));
        if (dtype == F32) memcpy(wide, x + at * 4, (size_t)m * 4);
        else widen(dtype, x + at * 2, m, wide);
        for (int64_t i = 0; i < m; i++) {
            const float a = fabsf(wide[i]);
            wide[i] = ulp(a < b ? b : a, type);
        }
        for (int64_t i = 0; i < m; i++) {
            const int32_t u = (int32_t)to_bits(wide[i]);
            low = u < low ? u : low, high = u > high ? u : high;
        }
        for (int64_t i = m; i < (m + LANES - 1) / LANES * LANES; i++) wide[i] = 0;
        for (int64_t i = 0; i < m; i += LANES)
            for (int j = 0; j < LANES; j++) lane[j] += (double)wide[i + j] * (double)wide[i + j];
    }
    for (int j = 0; j < LANES; j++) sum += lane[j];
    /* 2^15 squares below 2^(2 high + 1), all multiples of 2^(2 low): 53 bits hold 18 octaves */
    return (double)from_bits((uint32_t)high) <= 0x1p18 * (double)from_bits((uint32_t)low) ? sum : -1;
}

/* ---- instruction sets ---- */

#define VARIANT(NAME, TARGET) TARGET static void unit_##NAME(const Unit *w) { unit(w); }
#define ROUND(NAME, TARGET)                                                                                          \
    TARGET static Look looked_##NAME(const float *x, int64_t n, int64_t place) {                                     \
        Looks_##NAME seen = {0};                                                                                     \
        for (int64_t at = 0, m; at < n; at += m) {                                                                   \
            m = step(place + at, n - at);                                                                            \
            next_page(x + at);                                                                                       \
            look_##NAME(x + at, m, place + at, &seen, NULL, 0);                                                     \
        }                                                                                                            \
        return seen_##NAME(&seen);                                                                                   \
    }                                                                                                                \
    TARGET static Look moved_##NAME(const float *restrict p, const float *restrict x, float *restrict d, int64_t n, int64_t place) { \
        Looks_##NAME seen = {0};                                                                                     \
        for (int64_t at = 0, m; at < n; at += m) {                                                                   \
            m = step(place + at, n - at);                                                                            \
            next_page(p + at), next_page(x + at), next_page(d + at);                                                 \
            for (int64_t i = at; i < at + m; i++) d[i] = p[i] - x[i];                                                \
            look_##NAME(d + at, m, place + at, &seen, NULL, 0);                                                     \
        }                                                                                                            \
        return seen_##NAME(&seen);                                                                                   \
    }                                                                                                                \
    TARGET static Look load_##NAME(float *p, const float *x, int64_t n, int64_t place) {                            \
        Looks_##NAME seen = {0};                                                                                     \
        for (int64_t at = 0, m; at < n; at += m) {                                                                   \
            m = step(place + at, n - at);                                                                            \
            next_page(p + at), next_page(x + at);                                                                    \
            look_##NAME(x + at, m, place + at, &seen, p + at, 1);                                                   \
        }                                                                                                            \
        return seen_##NAME(&seen);                                                                                   \
    }                                                                                                                \
    TARGET static void beyond_##NAME(const float *d, const char *x, int dtype, int64_t n, const Limit *l, Beyond *worst) { \
        if (dtype == F32) beyond(d, x, F32, n, l, worst);                                                           \
        else beyond(d, x, dtype, n, l, worst);                                                                      \
    }                                                                                                               \
    TARGET static double ulp_squares_##NAME(const char *x, int dtype, int64_t n, float b) {                         \
        return dtype == F32 ? ulp_squares(x, F32, n, b) : ulp_squares(x, dtype, n, b);                              \
    }                                                                                                               \
    TARGET static void mean_##NAME(const Sum *s, int negative, float *out, int64_t from, int64_t n) {                \
        mean(s, negative, out, from, n);                                                                            \
    }                                                                                                               \
    TARGET static void descend_##NAME(const Sum *s, const Descent *h, float *x, float *v, int64_t from, int64_t n) { \
        descend(s, h, x, v, from, n);                                                                               \
    }
VARIANT(portable, )
ROUND(portable, )
#ifdef X86
#include <immintrin.h>

/* BiClip in fp32, the case that matters most, by hand: one loop whose update and counts come from the same registers, and
 * which asks for memory AHEAD bytes early. Against the update alone, 24M elements: counts in loops of their own 1.25 (one
 * thread), in this loop 1.04 to 1.15 without asking early, 0.97 to 1.09 with it (two threads, several runs). 1 KiB was the
 * best of 1, 2 and 4 in one run; runs differ by 3 %. A line at a time, and with a loop of its own for a step that only
 * descends (`plain`: no decay, no maximize), a tensor in the cache takes 0.65 of its time with eight at a time and one loop
 * for all; one in memory takes as long. */
enum { AHEAD = 1024 };

typedef struct { __m256 sign, u, d, dead, low, high, neg_lr, decay; } Wide;
typedef struct { __m256i zeros, belows, aboves, largest; __m256d squares_low, squares_high; } Seen;

__attribute__((target("avx2,fma"), always_inline)) static inline void eight(float *p, const float *g, const Wide *k, Seen *seen,
                                                                           const int counted, const int plain, const int maximize) {
    const __m256 x = _mm256_loadu_ps(g), a = _mm256_andnot_ps(k->sign, x);
    const __m256 unmoved = _mm256_cmp_ps(a, k->dead, _CMP_LE_OQ);
    __m256 c = _mm256_min_ps(k->u, _mm256_max_ps(k->d, a)), y = _mm256_loadu_ps(p); /* data second: NaN stays */
    c = _mm256_or_ps(c, maximize ? _mm256_andnot_ps(x, k->sign) : _mm256_and_ps(x, k->sign));
    c = _mm256_andnot_ps(unmoved, c);
    if (!plain) y = _mm256_mul_ps(y, k->decay);
    _mm256_storeu_ps(p, _mm256_fmadd_ps(k->neg_lr, c, y));
    if (!counted) return;
    seen->zeros = _mm256_sub_epi32(seen->zeros, _mm256_castps_si256(unmoved));
    seen->belows = _mm256_sub_epi32(seen->belows, _mm256_castps_si256(_mm256_cmp_ps(a, k->low, _CMP_LE_OQ)));
    seen->aboves = _mm256_sub_epi32(seen->aboves, _mm256_castps_si256(_mm256_cmp_ps(a, k->high, _CMP_GT_OQ)));
    seen->largest = _mm256_max_epi32(seen->largest, _mm256_castps_si256(a));
    const __m256d x_low = _mm256_cvtps_pd(_mm_loadu_ps(g)), x_high = _mm256_cvtps_pd(_mm_loadu_ps(g + 4));
    seen->squares_low = _mm256_fmadd_pd(x_low, x_low, seen->squares_low);
    seen->squares_high = _mm256_fmadd_pd(x_high, x_high, seen->squares_high);
}

__attribute__((target("avx2,fma"), always_inline)) static inline void biclip_avx2(const Unit *w, const int counted, const int plain) {
    const Row_f32 r = row_f32(w->row);
    const float dead = r.dead_zone, low = r.d > dead ? r.d : dead;
    const float high = r.u > low ? nextafterf(r.u, 0.0f) : low; /* a > high is a >= u, where that is not below too */
    const Wide k = {_mm256_set1_ps(-0.0f), _mm256_set1_ps(r.u), _mm256_set1_ps(r.d), _mm256_set1_ps(dead), _mm256_set1_ps(low),
                    _mm256_set1_ps(high), _mm256_set1_ps(r.neg_lr), _mm256_set1_ps(r.decay)};
    Seen seen = {0};
    const int64_t block = STRIDE * LINE / 4, full = w->count / 8 * 8;
    float wide[1]; /* fp32 needs no widening */
    float *p = w->p;
    const float *g = w->g;
    for (int64_t at = 0; at < w->count; at += block) {
        const int64_t end = at + block < full ? at + block : full;
        int64_t i = at;
        if (at % (PAGE / 4) == 0) next_page(g + at), next_page(p + at);
        for (; i + LINE / 4 <= end; i += LINE / 4) {
            _mm_prefetch((const char *)(g + i) + AHEAD, _MM_HINT_NTA); /* read once: leave the caches to p */
            _mm_prefetch((const char *)(p + i) + AHEAD, _MM_HINT_T0);
            eight(p + i, g + i, &k, &seen, counted, plain, plain ? 0 : r.maximize);
            eight(p + i + 8, g + i + 8, &k, &seen, counted, plain, plain ? 0 : r.maximize);
        }
        if (i < end) eight(p + i, g + i, &k, &seen, counted, plain, plain ? 0 : r.maximize);
        if (w->bins) sample(w, at, w->count - at < block ? w->count - at : block, wide);
    }
    biclip_run_f32(p + full, g + full, w->count - full, w->row);
    if (!counted) return;
    int32_t lanes[4][8];
    double lane[LANES];
    _mm256_storeu_si256((void *)lanes[0], seen.zeros);
    _mm256_storeu_si256((void *)lanes[1], seen.belows);
    _mm256_storeu_si256((void *)lanes[2], seen.aboves);
    _mm256_storeu_si256((void *)lanes[3], seen.largest);
    _mm256_storeu_pd(lane, seen.squares_low);
    _mm256_storeu_pd(lane + 4, seen.squares_high);
    Tally *t = w->tally, whole = {0};
    float top = 0;
    for (int j = 0; j < 8; j++) {
        t->zero += lanes[0][j], t->below += lanes[1][j] - lanes[0][j], t->above += lanes[2][j];
        const float x = from_bits((uint32_t)lanes[3][j]);
        top = x <= top ? top : x; /* NaN wins */
    }
    t->elements += full, t->largest = top;
    tally_f32(g + full, w->count - full, w->row, t, lane);
    if (!(top < INFINITY)) { /* rare: count again, finite elements only */
        memset(lane, 0, sizeof lane);
        tally_f32(g, w->count, w->row, &whole, lane);
        *t = whole;
    }
    fold(lane, t);
}

__attribute__((target("avx2,fma"))) static void biclip_f32_avx2(const Unit *w) {
    const int plain = w->row->decay == 1.0 && w->row->maximize == 0.0;
    if (w->tally) plain ? biclip_avx2(w, 1, 1) : biclip_avx2(w, 1, 0);
    else plain ? biclip_avx2(w, 0, 1) : biclip_avx2(w, 0, 0);
}

/* Wider registers gain nothing here, memory is the limit: both variants share the loop. */
#define HANDMADE(W) ((W)->op == BICLIP && (W)->dtype == F32 && ((W)->tally || !(W)->bins))

__attribute__((target("avx2,fma"))) static void unit_avx2(const Unit *w) {
    if (HANDMADE(w)) biclip_f32_avx2(w);
    else unit(w);
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"))) static void unit_avx512(const Unit *w) {
    if (HANDMADE(w)) biclip_f32_avx2(w);
    else unit(w);
}

/* The look by hand: a compiler multiplies words by keys with six shuffles a register. Here the keys of the words with an odd
 * place are loaded from one further on, which takes no longer than a plain sum (2.1M elements in the third cache: 1.01 of its
 * time, against 1.06 with a shift). */
typedef struct { uint64_t sum; __m256i top; } Looks_avx2;

__attribute__((target("avx2,fma"), always_inline)) static inline void look_avx2(const float *x, int64_t n, int64_t place, Looks_avx2 *seen,
                                                                                float *to, const int copied) {
    const uint32_t *key = KEYS + place % PLACES;
    __m256i even = _mm256_setzero_si256(), odd = even, top = seen->top;
    int64_t i = 0;
#pragma GCC unroll 4
    for (; i + 8 <= n; i += 8) {
        const __m256i word = _mm256_loadu_si256((const void *)(x + i));
        const __m256i k = _mm256_loadu_si256((const void *)(key + i)), next = _mm256_loadu_si256((const void *)(key + i + 1));
        if (copied) _mm256_storeu_si256((void *)(to + i), word);
        even = _mm256_add_epi64(even, _mm256_mul_epu32(word, k));
        odd = _mm256_add_epi64(odd, _mm256_mul_epu32(_mm256_srli_epi64(word, 32), next));
        top = _mm256_max_epi32(top, _mm256_and_si256(word, _mm256_set1_epi32(0x7fffffff)));
    }
    even = _mm256_add_epi64(even, odd);
    const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(even), _mm256_extracti128_si256(even, 1));
    uint64_t sum = (uint64_t)_mm_cvtsi128_si64(half) + (uint64_t)_mm_extract_epi64(half, 1);
    if (i < n) {
        uint32_t last[8] = {0};
        memcpy(last, x + i, (size_t)(n - i) * 4);
        if (copied) memcpy(to + i, last, (size_t)(n - i) * 4);
        for (int64_t j = 0; j < n - i; j++) sum += (uint64_t)last[j] * key[i + j];
        top = _mm256_max_epi32(top, _mm256_and_si256(_mm256_loadu_si256((const void *)last), _mm256_set1_epi32(0x7fffffff)));
    }
    seen->top = top;
    seen->sum += sum * page_key((uint64_t)(place / PLACES));
}

__attribute__((target("avx2,fma"), always_inline)) static inline Look seen_avx2(const Looks_avx2 *s) {
    uint32_t tops[8];
    Look seen = {s->sum, 0};
    _mm256_storeu_si256((void *)tops, s->top);
    for (int j = 0; j < 8; j++) seen.largest = tops[j] > seen.largest ? tops[j] : seen.largest;
    return seen;
}

ROUND(avx2, __attribute__((target("avx2,fma"))))
#endif

typedef struct {
    const char *name;
    void (*run)(const Unit *);
    Look (*looked)(const float *, int64_t, int64_t);
    Look (*moved)(const float *, const float *, float *, int64_t, int64_t);
    Look (*load)(float *, const float *, int64_t, int64_t);
    void (*mean)(const Sum *, int, float *, int64_t, int64_t);
    void (*descend)(const Sum *, const Descent *, float *, float *, int64_t, int64_t);
    void (*beyond)(const float *, const char *, int, int64_t, const Limit *, Beyond *);
    double (*ulp_squares)(const char *, int, int64_t, float);
} Variant;
static const Variant VARIANTS[] = { /* best last */
    {"portable", unit_portable, looked_portable, moved_portable, load_portable, mean_portable, descend_portable, beyond_portable, ulp_squares_portable},
#ifdef X86
    {"avx2", unit_avx2, looked_avx2, moved_avx2, load_avx2, mean_avx2, descend_avx2, beyond_avx2, ulp_squares_avx2},
    {"avx512", unit_avx512, looked_avx2, moved_avx2, load_avx2, mean_avx2, descend_avx2, beyond_avx2, ulp_squares_avx2},
#endif
};

EXPORT int tailopt_version(void) { return VERSION; }

EXPORT int tailopt_openmp(void) {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}

/* The name of variant i, or NULL past the last one this processor can run. */
EXPORT const char *tailopt_variant(int i) {
    if (i < 0 || i >= (int)(sizeof VARIANTS / sizeof *VARIANTS)) return NULL;
#ifdef X86
    __builtin_cpu_init();
    if (i == 1 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return NULL;
    if (i == 2 && !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))) return NULL;
#endif
    return VARIANTS[i].name;
}

/* ---- the pass ---- */

typedef struct {
    int op, variant, phase, tensors;
    const uint64_t *p, *g;          /* addresses; p is not read for COUNT */
    const int64_t *count;
    const int32_t *dtype, *row, *slot;
    const Row *rows;
    Tally *tally;                   /* added to at the tensor's slot; or NULL */
    uint64_t *bins, *logs;          /* BINS a slot each, added to; or NULL */
    Tally *partial;                 /* one a unit */
} Pass;

static void flush(uint64_t *table, uint64_t *bins, uint64_t *logs) {
    for (int k = 0; k < BINS; k++)
        if (table[k]) {
            const uint64_t count = table[k] >> 40, log = table[k] & (((uint64_t)1 << 40) - 1);
#ifdef _OPENMP
#pragma omp atomic
#endif
            bins[k] += count;
#ifdef _OPENMP
#pragma omp atomic
#endif
            logs[k] += log;
            table[k] = 0;
        }
}

static int64_t claim(int64_t *next) {
    int64_t mine;
#ifdef _OPENMP
#pragma omp atomic capture
#endif
    mine = (*next)++;
    return mine;
}

/* One unit after another as they are free: no thread waits for a slower one, and all read neighbouring memory. */
static void share(const Pass *s, int64_t *next) {
    uint64_t table[BINS] = {0};
    int64_t index = 0, mine = claim(next);
    for (int i = 0; i < s->tensors; i++) {
        const int64_t n = s->count[i];
        int held = 0; /* units in the table; packed sums hold 128 complete ones */
        for (int64_t at = 0; at < n; at += UNIT, index++) {
            if (index != mine) continue;
            mine = claim(next);
            const int64_t byte = at * size_of(s->dtype[i]);
            Unit w = {s->op, s->dtype[i], n - at < UNIT ? n - at : UNIT, n < UNIT ? -1 : s->phase,
                      s->op == COUNT ? NULL : (char *)(uintptr_t)s->p[i] + byte, (const char *)(uintptr_t)s->g[i] + byte,
                      s->rows + s->row[i], s->partial ? s->partial + index : NULL, s->bins ? table : NULL};
            VARIANTS[s->variant].run(&w);
            if (s->bins && ++held == 128) flush(table, s->bins + (int64_t)s->slot[i] * BINS, s->logs + (int64_t)s->slot[i] * BINS), held = 0;
        }
        if (held) flush(table, s->bins + (int64_t)s->slot[i] * BINS, s->logs + (int64_t)s->slot[i] * BINS);
    }
}

/* Returns 0, or -1 when there was no memory for the partial sums (nothing was touched then). */
EXPORT int tailopt_pass(int op, int variant, int threads, int tensors, const uint64_t *p, const uint64_t *g,
                        const int64_t *count, const int32_t *dtype, const int32_t *row, const double *rows,
                        const int32_t *slot, void *tally, uint64_t *bins, uint64_t *logs, int phase) {
    Pass s = {op, variant, phase, tensors, p, g, count, dtype, row, slot,
              (const Row *)rows, (Tally *)tally, bins, logs, NULL};
    int64_t total = 0, units = 0, next = 0;
    for (int i = 0; i < tensors; i++) total += count[i], units += (count[i] + UNIT - 1) / UNIT;
    if (tally && units && !(s.partial = (Tally *)calloc((size_t)units, sizeof(Tally)))) return -1;
    if (total < SERIAL || threads < 2) {
        share(&s, &next);
    } else {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
        share(&s, &next);
#else
        share(&s, &next);
#endif
    }
    const Tally *unit_tally = s.partial;
    for (int i = 0; s.partial && i < tensors; i++)
        for (int64_t at = 0; at < count[i]; at += UNIT, unit_tally++) {
            Tally *t = s.tally + slot[i];
            t->elements += unit_tally->elements, t->zero += unit_tally->zero, t->below += unit_tally->below, t->above += unit_tally->above;
            t->nonfinite += unit_tally->nonfinite, t->squares += unit_tally->squares;
            t->largest = unit_tally->largest > t->largest ? unit_tally->largest : t->largest;
        }
    free(s.partial);
    return 0;
}

/* ---- a round between nodes ---- */

/* Pieces of stretches: d = p - x, where p is NULL a look at d, where d is NULL p = x. */
typedef struct {
    const Variant *v;
    int pieces;
    const uint64_t *p, *x, *d;      /* addresses */
    const int64_t *count, *place;   /* place: of a piece's first element in its stretch */
    const int32_t *slot;            /* the stretch */
    uint64_t *sums;                 /* of what was looked at, by slot: checksum, and largest magnitude or NULL */
    uint32_t *largest;
} Pieces;

static Look unit_of(const Pieces *s, int k, int64_t at) {
    const int64_t n = s->count[k] - at < UNIT ? s->count[k] - at : UNIT, place = s->place[k] + at;
    float *p = s->p ? (float *)(uintptr_t)s->p[k] + at : NULL, *d = s->d ? (float *)(uintptr_t)s->d[k] + at : NULL;
    if (!p) return s->v->looked(d, n, place);
    const float *x = (const float *)(uintptr_t)s->x[k] + at;
    return d ? s->v->moved(p, x, d, n, place) : s->v->load(p, x, n, place);
}

static void add_up_looks(const Pieces *s, int slot, Look seen) {
#ifdef _OPENMP
#pragma omp critical
#endif
    {
        s->sums[slot] += seen.sum;
        if (s->largest && seen.largest > s->largest[slot]) s->largest[slot] = seen.largest;
    }
}

static void share_pieces(const Pieces *s, int64_t *next) {
    Look seen = {0, 0};
    int64_t index = 0, mine = claim(next);
    for (int k = 0; k < s->pieces; k++) {
        for (int64_t at = 0; at < s->count[k]; at += UNIT, index++) {
            if (index != mine) continue;
            mine = claim(next);
            const Look more = unit_of(s, k, at);
            seen.sum += more.sum;
            seen.largest = more.largest > seen.largest ? more.largest : seen.largest;
        }
        if (k + 1 == s->pieces || s->slot[k + 1] != s->slot[k]) {
            add_up_looks(s, s->slot[k], seen);
            seen.sum = 0, seen.largest = 0;
        }
    }
}

static void pass_pieces(const Pieces *s, int threads) {
    int64_t total = 0, next = 0;
    for (int k = 0; k < s->pieces; k++) total += s->count[k];
    if (total < SERIAL || threads < 2) {
        share_pieces(s, &next);
    } else {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
#endif
        share_pieces(s, &next);
    }
}

EXPORT void tailopt_moved(int variant, int threads, int pieces, const uint64_t *p, const uint64_t *x, const uint64_t *d,
                          const int64_t *count, const int64_t *place, const int32_t *slot, uint64_t *sums, uint32_t *largest) {
    const Pieces s = {VARIANTS + variant, pieces, p, x, d, count, place, slot, sums, largest};
    pass_pieces(&s, threads);
}

EXPORT void tailopt_load(int variant, int threads, int pieces, const uint64_t *p, const uint64_t *x, const int64_t *count,
                         const int64_t *place, const int32_t *slot, uint64_t *sums) {
    const Pieces s = {VARIANTS + variant, pieces, p, x, NULL, count, place, slot, sums, NULL};
    pass_pieces(&s, threads);
}

EXPORT void tailopt_mean(int variant, int threads, const uint64_t *rows, const float *shares, int nodes, float whole,
                         int negative, void *out, int64_t n) {
    const Variant *v = VARIANTS + variant;
    const Sum s = {rows, shares, nodes, whole};
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (n >= SERIAL && threads > 1)
#endif
    for (int64_t at = 0; at < n; at += UNIT) v->mean(&s, negative, (float *)out, at, n - at < UNIT ? n - at : UNIT);
}

/* Piece by piece: x and v (or v NULL) from the sum of the rows' elements that begin at from. */
EXPORT void tailopt_descend(int variant, int threads, const uint64_t *rows, const float *shares, int nodes, float whole,
                            int pieces, const int64_t *from, const int64_t *count, const uint64_t *x, const uint64_t *v,
                            const float *neg_lr, float momentum, int nesterov, int fused) {
    const Variant *best = VARIANTS + variant;
    const Sum s = {rows, shares, nodes, whole};
    for (int k = 0; k < pieces; k++) {
        const Descent h = {neg_lr[k], momentum, nesterov, fused};
        const int64_t n = count[k];
        float *to = (float *)(uintptr_t)x[k], *state = v ? (float *)(uintptr_t)v[k] : NULL;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (n >= SERIAL && threads > 1)
#endif
        for (int64_t at = 0; at < n; at += UNIT)
            best->descend(&s, &h, to + at, state ? state + at : NULL, from[k] + at, n - at < UNIT ? n - at : UNIT);
    }
}

/* Piece by piece, d in fp32 and x in its own type: which element is farthest beyond a + c |x| and the slack, or -1, and how far
 * it may be at most. */
EXPORT void tailopt_beyond(int variant, int threads, int pieces, const uint64_t *d, const uint64_t *x, const int64_t *count,
                           const int32_t *dtype, const double *a, const double *c, float slack, float ulps, int64_t *at,
                           float *most) {
    const Variant *v = VARIANTS + variant;
    for (int k = 0; k < pieces; k++) {
        const Limit l = {(float)a[k], (float)c[k], slack, ulps, type_of(dtype[k])};
        const int64_t n = count[k];
        Beyond worst = {-1, 0, 0};
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (n >= SERIAL && threads > 1)
#endif
        for (int64_t from = 0; from < n; from += UNIT) {
            Beyond found = {-1, 0, 0};
            v->beyond((const float *)(uintptr_t)d[k] + from, (const char *)(uintptr_t)x[k] + from * size_of(dtype[k]), dtype[k],
                      n - from < UNIT ? n - from : UNIT, &l, &found);
            if (found.at < 0) continue;
            found.at += from;
#ifdef _OPENMP
#pragma omp critical
#endif
            if (worst.at < 0 || found.excess > worst.excess || (found.excess == worst.excess && found.at < worst.at)) worst = found;
        }
        at[k] = worst.at, most[k] = worst.allowed;
    }
}

/* Block by block: the sum of squares of the units in the last place of max(|x|, b), or -1 where it depends on the order. */
EXPORT void tailopt_ulp_squares(int variant, int threads, const void *x, int dtype, int64_t n, double b, double *sums) {
    const Variant *v = VARIANTS + variant;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (n >= SERIAL && threads > 1)
#endif
    for (int64_t at = 0; at < n; at += BLOCK)
        sums[at / BLOCK] = v->ulp_squares((const char *)x + at * size_of(dtype), dtype, n - at < BLOCK ? n - at : BLOCK, (float)b);
}
