/* The optimizer step: one pass over many tensors, one parallel region per step.
 *
 *     p <- fma(-lr, clip(g), p * decay)            (clipping/reference.py is the same in torch)
 *
 * and what the pass counts on the way: thresholds hit, squares, the maximum, a histogram.
 */
#include "elements.h"

enum { BICLIP, RESCALE, COUNT, MOMENTUM };    /* clip by value; (g*s/n)*t; count only; clip a mean of gradients by value */
enum { STRIDE = 32, BINS = 256 };
enum { BF16_LANES = 2 * LANES };    /* bf16 fits twice into a register, and more chains of additions run side by side */

typedef struct {
    double neg_lr, decay, maximize, u, d, dead_zone, scale, norm, target;
    double beta, rest, limit, correction;   /* momentum: beta, 1 - beta, u / (1 - beta), 1 - beta^k */
} Row;
typedef struct { int64_t elements, zero, below, above, nonfinite; double squares, largest; } Counters;
typedef struct {
    int op, dtype;
    int64_t count;
    int sample_offset;                      /* which of STRIDE lines to sample; -1: all */
    void *p;
    const void *g;
    const Row *row;
    Counters *counters;                   /* NULL: do not count */
    uint64_t *bins;                 /* NULL: no histogram; a bin is count << 40 | sum of log2 fractions, 16 bits each */
    void *m;                        /* MOMENTUM only */
    int m_dtype;
} Unit;

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

#define COUNTING(REAL, BITS, SUFFIX, MAGNITUDE, INFINITE, BEFORE)                                                       \
    INLINE void count_##SUFFIX(const REAL *restrict x, int64_t n, const Row *row, Counters *t, double *lane, const int lanes) { \
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
                else lane[i % lanes] = fma(a, a, lane[i % lanes]), t->largest = a > t->largest ? a : t->largest;    \
            }                                                                                                       \
            return;                                                                                                 \
        }                                                                                                           \
        REAL top;                                                                                                   \
        memcpy(&top, &largest, sizeof top);                                                                         \
        t->largest = top > t->largest ? top : t->largest;                                                           \
        int64_t i = 0;                                                                                              \
        for (; i + lanes <= n; i += lanes)                                                                          \
            for (int j = 0; j < lanes; j++) lane[j] = fma((double)x[i + j], (double)x[i + j], lane[j]);             \
        for (; i < n; i++) lane[i % lanes] = fma((double)x[i], (double)x[i], lane[i % lanes]);                      \
    }

COUNTING(float, int32_t, f32, INT32_MAX, 0x7f800000, nextafterf)
COUNTING(double, int64_t, f64, INT64_MAX, 0x7ff0000000000000, nextafter)

/* Bin = biased exponent of a float, an octave: 2^(bin-127) <= |x| < 2^(bin-126); bin 0 holds what is smaller, zeros too, bin
 * 255 what is not finite. log2 of the mantissa comes from a table by its first 10 bits (middle of the cell, 16 bits of
 * fraction): sums of integers have no order, so they repeat whatever the threads did. */
static uint16_t LOG2[1024];

HIDDEN void prepare_logarithms(void) {
    for (int i = 0; i < 1024; i++) LOG2[i] = (uint16_t)(log2(1.0 + (i + 0.5) / 1024.0) * 65536.0 + 0.5);
}

INLINE void histogram(const float *x, int64_t n, uint64_t *bins) {
    for (int64_t i = 0; i < n; i++) {
        const uint32_t b = to_bits(x[i]) & 0x7fffffffu;
        bins[b >> 23] += (uint64_t)1 << 40 | LOG2[(b >> 13) & 1023u];
    }
}

/* ---- a unit: in blocks of STRIDE cache lines, each updated, counted and sampled while it is in the first cache ---- */

INLINE void sample(const Unit *w, int64_t at, int64_t n, float *wide) {
    const int64_t size = size_of(w->dtype), line = LINE / size;
    const int64_t first = w->sample_offset < 0 ? 0 : w->sample_offset * line, end = w->sample_offset < 0 ? n : first + line < n ? first + line : n;
    const char *g = (const char *)w->g + (at + first) * size;
    if (first >= end) return;
    if (w->dtype == F32) {
        histogram((const float *)g, end - first, w->bins);
    } else {
        widen(w->dtype, g, end - first, wide);
        histogram(wide, end - first, w->bins);
    }
}

INLINE void count_block(const Unit *w, int64_t at, int64_t n, double *lane, float *wide) {
    const char *g = (const char *)w->g + at * size_of(w->dtype);
    if (w->dtype == F32) count_f32((const float *)g, n, w->row, w->counters, lane, LANES);
    else if (w->dtype == F64) count_f64((const double *)g, n, w->row, w->counters, lane, LANES);
    else {
        widen(w->dtype, g, n, wide);
        if (w->dtype == BF16) count_f32(wide, n, w->row, w->counters, lane, BF16_LANES);
        else count_f32(wide, n, w->row, w->counters, lane, LANES);
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

INLINE void fold(const double *lane, int lanes, Counters *t) {
    double sum[BF16_LANES];
    memcpy(sum, lane, (size_t)lanes * sizeof *sum);
    for (int half = lanes / 2; half; half /= 2)
        for (int j = 0; j < half; j++) sum[j] += sum[j + half];
    t->squares = sum[0];
}

INLINE void unit(const Unit *w) {
    const int64_t size = size_of(w->dtype), block = (w->counters || w->bins ? STRIDE * LINE : PAGE) / size;
    double lane[BF16_LANES] = {0};
    float wide[STRIDE * LINE / 2];
    for (int64_t at = 0; at < w->count; at += block) {
        const int64_t n = w->count - at < block ? w->count - at : block;
        if (at * size % PAGE == 0) {
            next_page((const char *)w->g + at * size);
            if (w->op != COUNT) next_page((const char *)w->p + at * size);
        }
        if (w->counters) count_block(w, at, n, lane, wide);
        if (w->bins) sample(w, at, n, wide);
        if (w->op != COUNT) update(w, at, n);
    }
    if (w->counters) fold(lane, w->dtype == BF16 ? BF16_LANES : LANES, w->counters);
}

/* ---- momentum: m is a mean of clamped gradients, and what is clipped and counted is m / (1 - beta^k) ---- */

enum { MEANS = 1024 };              /* elements at a time: p, g, m and the means stay in the first cache as floats */

#define MOMENTUM_RUN(REAL, SUFFIX, FMA)                                                                              \
    INLINE void momentum_run_##SUFFIX(REAL *restrict p, const REAL *restrict g, REAL *restrict m, REAL *restrict mean, \
                                      int64_t n, const Row *row, int maximize) {                                    \
        const Row_##SUFFIX r = row_##SUFFIX(row);                                                                   \
        const REAL beta = (REAL)row->beta, rest = (REAL)row->rest, limit = (REAL)row->limit, correction = (REAL)row->correction; \
        for (int64_t i = 0; i < n; i++) {                                                                           \
            REAL x = maximize ? -g[i] : g[i];                                                                       \
            x = x < -limit ? -limit : x; /* NaN passes */                                                           \
            x = x > limit ? limit : x;                                                                              \
            m[i] = FMA(rest, x, beta * m[i]);                                                                       \
            mean[i] = m[i] / correction;                                                                            \
            p[i] = biclip_##SUFFIX(p[i], mean[i], &r, 0);                                                           \
        }                                                                                                           \
    }

MOMENTUM_RUN(float, f32, fmaf)
MOMENTUM_RUN(double, f64, fma)

INLINE void narrow(int dtype, const float *x, int64_t n, void *out) {
    uint16_t *h = out;
    /* unlike in SWEEP_16, a NaN may come from an fp32 gradient, with any bits in its lower half */
    if (dtype == BF16) for (int64_t i = 0; i < n; i++) h[i] = x[i] == x[i] ? (uint16_t)(bf16_round(x[i]) >> 16) : 0x7fc0;
    else for (int64_t i = 0; i < n; i++) h[i] = f16_narrow(x[i]);
}

/* The sample of a mean: the lines that `sample` would take of a gradient in fp32. */
INLINE void sample_means(const Unit *w, int64_t at, const float *mean, int64_t n) {
    const int64_t line = LINE / 4;
    if (w->sample_offset < 0) histogram(mean, n, w->bins);
    else for (int64_t i = 0; i < n; i += line)
        if ((at + i) / line % STRIDE == w->sample_offset) histogram(mean + i, n - i < line ? n - i : line, w->bins);
}

INLINE void momentum_f64(const Unit *w) {
    double lane[LANES] = {0}, mean[MEANS];
    float wide[MEANS];
    double *p = w->p, *m = w->m;
    const double *g = w->g;
    for (int64_t at = 0; at < w->count; at += MEANS) {
        const int64_t n = w->count - at < MEANS ? w->count - at : MEANS;
        momentum_run_f64(p + at, g + at, m + at, mean, n, w->row, w->row->maximize != 0);
        if (w->counters) count_f64(mean, n, w->row, w->counters, lane, LANES);
        if (w->bins) widen(F64, (const char *)mean, n, wide), sample_means(w, at, wide, n);
    }
    if (w->counters) fold(lane, LANES, w->counters);
}

INLINE void momentum_f32(const Unit *w) {
    double lane[LANES] = {0};
    float mean[MEANS], p_wide[MEANS], g_wide[MEANS], m_wide[MEANS];
    const int64_t size = size_of(w->dtype), m_size = size_of(w->m_dtype);
    for (int64_t at = 0; at < w->count; at += MEANS) {
        const int64_t n = w->count - at < MEANS ? w->count - at : MEANS;
        char *p_here = (char *)w->p + at * size, *m_here = (char *)w->m + at * m_size;
        const char *g_here = (const char *)w->g + at * size;
        next_page(g_here), next_page(p_here), next_page(m_here);
        if (w->dtype == F32 && w->m_dtype == F32) {
            momentum_run_f32((float *)p_here, (const float *)g_here, (float *)m_here, mean, n, w->row, w->row->maximize != 0);
        } else {
            float *p = w->dtype == F32 ? (float *)p_here : p_wide, *m = w->m_dtype == F32 ? (float *)m_here : m_wide;
            const float *g = w->dtype == F32 ? (const float *)g_here : g_wide;
            if (w->dtype != F32) widen(w->dtype, p_here, n, p_wide), widen(w->dtype, g_here, n, g_wide);
            if (w->m_dtype != F32) widen(w->m_dtype, m_here, n, m_wide);
            momentum_run_f32(p, g, m, mean, n, w->row, w->row->maximize != 0);
            if (w->dtype != F32) narrow(w->dtype, p_wide, n, p_here);
            if (w->m_dtype != F32) narrow(w->m_dtype, m_wide, n, m_here);
        }
        if (w->counters) count_f32(mean, n, w->row, w->counters, lane, LANES);
        if (w->bins) sample_means(w, at, mean, n);
    }
    if (w->counters) fold(lane, LANES, w->counters);
}

INLINE void any_unit(const Unit *w) {
    if (w->op != MOMENTUM) unit(w);
    else if (w->dtype == F64) momentum_f64(w);
    else momentum_f32(w);
}

/* ---- instruction sets ---- */

static void unit_portable(const Unit *w) { any_unit(w); }

#ifdef X86
#include <immintrin.h>

/* BiClip in fp32, the case that matters most, by hand: one loop whose update and counts come from the same registers. A line
 * at a time, and with a loop of its own for a step that only descends (`plain`: no decay, no maximize), a tensor in the cache
 * takes 0.65 of its time with eight at a time and one loop for all; one in memory takes as long.
 *
 * How many bytes early to ask for memory depends on the processor. Older ones (AVX2) gain from 1 KiB: against the update alone,
 * 24M elements, counts in this loop take 1.04 to 1.15 without asking early and 0.97 to 1.09 with it (two threads, several
 * runs). On an EPYC of 2024 (Zen 5) the same 1 KiB costs 17 % of a step in memory and 45 % of one in the third cache; with
 * 6 KiB a step that counts takes 0.75 of its time with 1 KiB, and one that does not is best left alone. */
enum { AHEAD_AVX2 = 1024, AHEAD_AVX512 = 4608 };

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

/* What the lanes of vectors have counted; whether all elements were finite. A magnitude's bits are in the order of the
 * magnitudes, with infinity above every number and NaN above infinity. */
INLINE int add_lanes(Counters *t, int width, const int32_t *zeros, const int32_t *belows, const int32_t *aboves, const int32_t *largest) {
    int32_t top = 0;
    for (int j = 0; j < width; j++) {
        t->zero += zeros[j], t->below += belows[j] - zeros[j], t->above += aboves[j];
        top = largest[j] > top ? largest[j] : top;
    }
    t->largest = from_bits((uint32_t)top);
    return top < 0x7f800000;
}

__attribute__((target("avx2,fma"), always_inline)) static inline void biclip_avx2(const Unit *w, const int counted, const int plain, const int ahead) {
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
        if (ahead == AHEAD_AVX2 && at % (PAGE / 4) == 0) next_page((const char *)(g + at)), next_page((const char *)(p + at));
        for (; i + LINE / 4 <= end; i += LINE / 4) {
            if (ahead) {
                _mm_prefetch((const char *)(g + i) + ahead, _MM_HINT_NTA); /* read once: leave the caches to p */
                _mm_prefetch((const char *)(p + i) + ahead, _MM_HINT_T0);
            }
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
    Counters *t = w->counters, whole = {0};
    const int finite = add_lanes(t, 8, lanes[0], lanes[1], lanes[2], lanes[3]);
    t->elements += full;
    count_f32(g + full, w->count - full, w->row, t, lane, LANES);
    if (!finite) { /* rare: count again, finite elements only */
        memset(lane, 0, sizeof lane);
        count_f32(g, w->count, w->row, &whole, lane, LANES);
        *t = whole;
    }
    fold(lane, LANES, t);
}

__attribute__((target("avx2,fma"))) static void biclip_f32_avx2(const Unit *w) {
    const int plain = w->row->decay == 1.0 && w->row->maximize == 0.0;
    if (w->counters) plain ? biclip_avx2(w, 1, 1, AHEAD_AVX2) : biclip_avx2(w, 1, 0, AHEAD_AVX2);
    else plain ? biclip_avx2(w, 0, 1, AHEAD_AVX2) : biclip_avx2(w, 0, 0, AHEAD_AVX2);
}

/* Memory is the limit: wider registers gain nothing. */
__attribute__((target("avx2,fma"))) static void biclip_f32_avx512(const Unit *w) {
    const int plain = w->row->decay == 1.0 && w->row->maximize == 0.0;
    if (w->counters) plain ? biclip_avx2(w, 1, 1, AHEAD_AVX512) : biclip_avx2(w, 1, 0, AHEAD_AVX512);
    else plain ? biclip_avx2(w, 0, 1, 0) : biclip_avx2(w, 0, 0, 0);
}

#define WIDTH 256
#include "biclip_bf16.h"
#define WIDTH 512
#include "biclip_bf16.h"

#define HANDMADE(W) ((W)->op == BICLIP && ((W)->counters || !(W)->bins))

__attribute__((target("avx2,fma"))) static void unit_avx2(const Unit *w) {
    if (HANDMADE(w) && w->dtype == F32) biclip_f32_avx2(w);
    else if (HANDMADE(w) && w->dtype == BF16) biclip_bf16_256(w);
    else any_unit(w);
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"))) static void unit_avx512(const Unit *w) {
    if (HANDMADE(w) && w->dtype == F32) biclip_f32_avx512(w);
    else if (HANDMADE(w) && w->dtype == BF16) biclip_bf16_512(w);
    else any_unit(w);
}

#endif

static void (*const RUN[VARIANTS])(const Unit *) = {
    unit_portable,
#ifdef X86
    unit_avx2,
    unit_avx512,
#endif
};

/* ---- the pass ---- */

typedef struct {
    int op, variant, sample_offset, tensors;
    const uint64_t *p, *g, *m;      /* addresses; p is not read for COUNT, m only for MOMENTUM */
    const int64_t *count;
    const int32_t *dtype, *m_dtype, *row, *slot;
    const Row *rows;
    Counters *counters;                   /* one per slot, added to; or NULL */
    uint64_t *bins, *logs;          /* BINS per slot each, added to; or NULL */
    Counters *partial;                 /* one per unit */
    int64_t claimed;                /* units that a thread takes at once */
} Pass;

/* Neighbouring units that a thread takes at once: more of them leave less of what was asked for early to the other threads,
 * and fewer let all threads end at the same time. In bf16, 24M elements, two threads: 0.97 of the time with 4 or 16 instead of
 * 1, as much as with 1 again for 32. */
enum { MOST_CLAIMED = 8, CLAIMS_PER_THREAD = 8 };

static int64_t units_at_once(int64_t units, int threads) {
    const int64_t share = units / ((int64_t)threads * CLAIMS_PER_THREAD);
    return share < 1 ? 1 : share > MOST_CLAIMED ? MOST_CLAIMED : share;
}

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

/* A few units after another as they are free: no thread waits for a slower one, and all read neighbouring memory. */
static void share(const Pass *s, int64_t *next) {
    uint64_t table[BINS] = {0};
    int64_t index = 0, mine = claim(next) * s->claimed;
    for (int i = 0; i < s->tensors; i++) {
        const int64_t n = s->count[i];
        int in_table = 0; /* units; packed sums hold 128 complete ones */
        for (int64_t at = 0; at < n; at += UNIT, index++) {
            if (index != mine) continue;
            if (++mine % s->claimed == 0) mine = claim(next) * s->claimed;
            const int64_t byte = at * size_of(s->dtype[i]);
            Unit w = {s->op, s->dtype[i], n - at < UNIT ? n - at : UNIT, n < UNIT ? -1 : s->sample_offset,
                      s->op == COUNT ? NULL : (char *)(uintptr_t)s->p[i] + byte, (const char *)(uintptr_t)s->g[i] + byte,
                      s->rows + s->row[i], s->partial ? s->partial + index : NULL, s->bins ? table : NULL, NULL, F32};
            if (s->op == MOMENTUM) w.m = (char *)(uintptr_t)s->m[i] + at * size_of(s->m_dtype[i]), w.m_dtype = s->m_dtype[i];
            RUN[s->variant](&w);
            if (s->bins && ++in_table == 128) flush(table, s->bins + (int64_t)s->slot[i] * BINS, s->logs + (int64_t)s->slot[i] * BINS), in_table = 0;
        }
        if (in_table) flush(table, s->bins + (int64_t)s->slot[i] * BINS, s->logs + (int64_t)s->slot[i] * BINS);
    }
}

/* Returns 0, or -1 if there was no memory for the partial sums; then nothing was changed. */
EXPORT int tailopt_pass(int op, int variant, int threads, int tensors, const uint64_t *p, const uint64_t *g, const uint64_t *m,
                        const int64_t *count, const int32_t *dtype, const int32_t *m_dtype, const int32_t *row,
                        const double *rows, const int32_t *slot, void *counters, uint64_t *bins, uint64_t *logs, int sample_offset) {
    Pass s = {op, variant, sample_offset, tensors, p, g, m, count, dtype, m_dtype, row, slot,
              (const Row *)rows, (Counters *)counters, bins, logs, NULL, 1};
    int64_t total = 0, units = 0, next = 0;
    for (int i = 0; i < tensors; i++) total += count[i], units += (count[i] + UNIT - 1) / UNIT;
    if (counters && units && !(s.partial = (Counters *)calloc((size_t)units, sizeof(Counters)))) return -1;
    if (total < SERIAL || threads < 2) {
        share(&s, &next);
    } else {
        s.claimed = units_at_once(units, threads);
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
        share(&s, &next);
#else
        share(&s, &next);
#endif
    }
    const Counters *of_unit = s.partial;
    for (int i = 0; s.partial && i < tensors; i++)
        for (int64_t at = 0; at < count[i]; at += UNIT, of_unit++) {
            Counters *t = s.counters + slot[i];
            t->elements += of_unit->elements, t->zero += of_unit->zero, t->below += of_unit->below, t->above += of_unit->above;
            t->nonfinite += of_unit->nonfinite, t->squares += of_unit->squares;
            t->largest = of_unit->largest > t->largest ? of_unit->largest : t->largest;
        }
    free(s.partial);
    return 0;
}
