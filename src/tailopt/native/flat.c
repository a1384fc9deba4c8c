/* Passes over flat fp32 buffers: what a round between nodes computes beside the optimizer steps.
 * Displacements, loading, checksums, the mean, plain descent along it, and the guard's exact test; one pass over memory each. */
#include "elements.h"

/* A checksum is a sum over the 32-bit words of a partition, modulo 2^64:
 *
 *     sum of word[i] * KEYS[i % PLACES] * page_key(i / PLACES)        i: the word's place in its partition
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

HIDDEN void prepare_checksum_keys(void) {
    for (int i = 0; i < PLACES; i++) KEYS[i] = (uint32_t)(mixed((uint64_t)i) >> 32) | 1;
}

/* ---- a round between nodes, fp32: what moved, what arrived and the mean, each in one pass ----
 *
 * In steps of at most NEAR elements, a page: the loops after the first find them in the first cache. A step ends where a page
 * of checksum keys does. The largest magnitude is that of the bit patterns, which has no order either. */
enum { NEAR = PAGE / 4 };

typedef struct { uint64_t sum; uint32_t largest; } Stats;

/* How many of n elements the next step takes, if the first has this place in its partition. */
INLINE int64_t step(int64_t place, int64_t n) {
    const int64_t rest = PLACES - place % PLACES;
    return n < rest ? n : rest;
}

/* Add elements within one page of keys, of which the first has this place in its partition; copied: and copy them. `to` is not
 * restrict: a compiler would take the copy out of the loop then, and read every page twice (1.8 times the time of a copy). */
INLINE void add_stats_portable(const float *x, int64_t n, int64_t place, Stats *stats, float *to, const int copied) {
    const uint32_t *key = KEYS + place % PLACES;
    uint64_t sum = 0;
    int32_t largest = 0;
    for (int64_t i = 0; i < n; i++) sum += (uint64_t)to_bits(x[i]) * key[i];
    for (int64_t i = 0; i < n; i++) {
        const int32_t b = (int32_t)(to_bits(x[i]) & 0x7fffffffu);
        largest = b > largest ? b : largest;
    }
    if (copied) memcpy(to, x, (size_t)n * sizeof *to);
    stats->sum += sum * page_key((uint64_t)(place / PLACES));
    stats->largest = (uint32_t)largest > stats->largest ? (uint32_t)largest : stats->largest;
}

typedef Stats StatsOf_portable;
INLINE Stats total_portable(const StatsOf_portable *s) { return *s; }

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

/* ---- the guard: rounds/guard.py is the same in torch, rounding by rounding ---- */

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

#define ROUND(NAME, TARGET)                                                                                          \
    TARGET static Stats stats_##NAME(const float *x, int64_t n, int64_t place) {                                     \
        StatsOf_##NAME stats = {0};                                                                                     \
        for (int64_t at = 0, m; at < n; at += m) {                                                                   \
            m = step(place + at, n - at);                                                                            \
            next_page(x + at);                                                                                       \
            add_stats_##NAME(x + at, m, place + at, &stats, NULL, 0);                                                     \
        }                                                                                                            \
        return total_##NAME(&stats);                                                                                   \
    }                                                                                                                \
    TARGET static Stats displacement_##NAME(const float *restrict p, const float *restrict x, float *restrict d, int64_t n, int64_t place) { \
        StatsOf_##NAME stats = {0};                                                                                     \
        for (int64_t at = 0, m; at < n; at += m) {                                                                   \
            m = step(place + at, n - at);                                                                            \
            next_page(p + at), next_page(x + at), next_page(d + at);                                                 \
            for (int64_t i = at; i < at + m; i++) d[i] = p[i] - x[i];                                                \
            add_stats_##NAME(d + at, m, place + at, &stats, NULL, 0);                                                     \
        }                                                                                                            \
        return total_##NAME(&stats);                                                                                   \
    }                                                                                                                \
    TARGET static Stats load_##NAME(float *p, const float *x, int64_t n, int64_t place) {                            \
        StatsOf_##NAME stats = {0};                                                                                     \
        for (int64_t at = 0, m; at < n; at += m) {                                                                   \
            m = step(place + at, n - at);                                                                            \
            next_page(p + at), next_page(x + at);                                                                    \
            add_stats_##NAME(x + at, m, place + at, &stats, p + at, 1);                                                   \
        }                                                                                                            \
        return total_##NAME(&stats);                                                                                   \
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

ROUND(portable, )

#ifdef X86
#include <immintrin.h>
/* The statistics by hand: a compiler multiplies words by keys with six shuffles per register. Here the keys of the words with an odd
 * place are loaded from one further on, which takes no longer than a plain sum (2.1M elements in the third cache: 1.01 of its
 * time, against 1.06 with a shift). */
typedef struct { uint64_t sum; __m256i top; } StatsOf_avx2;

__attribute__((target("avx2,fma"), always_inline)) static inline void add_stats_avx2(const float *x, int64_t n, int64_t place, StatsOf_avx2 *stats,
                                                                                float *to, const int copied) {
    const uint32_t *key = KEYS + place % PLACES;
    __m256i even = _mm256_setzero_si256(), odd = even, top = stats->top;
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
    stats->top = top;
    stats->sum += sum * page_key((uint64_t)(place / PLACES));
}

__attribute__((target("avx2,fma"), always_inline)) static inline Stats total_avx2(const StatsOf_avx2 *s) {
    uint32_t tops[8];
    Stats stats = {s->sum, 0};
    _mm256_storeu_si256((void *)tops, s->top);
    for (int j = 0; j < 8; j++) stats.largest = tops[j] > stats.largest ? tops[j] : stats.largest;
    return stats;
}

ROUND(avx2, __attribute__((target("avx2,fma"))))
#endif

typedef struct {
    Stats (*stats)(const float *, int64_t, int64_t);
    Stats (*displacement)(const float *, const float *, float *, int64_t, int64_t);
    Stats (*load)(float *, const float *, int64_t, int64_t);
    void (*mean)(const Sum *, int, float *, int64_t, int64_t);
    void (*descend)(const Sum *, const Descent *, float *, float *, int64_t, int64_t);
    void (*beyond)(const float *, const char *, int, int64_t, const Limit *, Beyond *);
    double (*ulp_squares)(const char *, int, int64_t, float);
} Passes;
#define PASSES(NAME) {stats_##NAME, displacement_##NAME, load_##NAME, mean_##NAME, descend_##NAME, beyond_##NAME, ulp_squares_##NAME}
static const Passes PASSES_OF[VARIANTS] = {
    PASSES(portable),
#ifdef X86
    PASSES(avx2),
    PASSES(avx2), /* memory is the limit: wider registers gain nothing */
#endif
};

/* Pieces of partitions: d = p - x; if p is NULL, only the statistics of d; if d is NULL, p = x. */
typedef struct {
    const Passes *v;
    int pieces;
    const uint64_t *p, *x, *d;      /* addresses */
    const int64_t *count, *place;   /* place: of a piece's first element in its partition */
    const int32_t *partition;
    uint64_t *sums;                 /* by partition: checksum, and largest magnitude or NULL */
    uint32_t *largest;
} Pieces;

static Stats unit_of(const Pieces *s, int k, int64_t at) {
    const int64_t n = s->count[k] - at < UNIT ? s->count[k] - at : UNIT, place = s->place[k] + at;
    float *p = s->p ? (float *)(uintptr_t)s->p[k] + at : NULL, *d = s->d ? (float *)(uintptr_t)s->d[k] + at : NULL;
    if (!p) return s->v->stats(d, n, place);
    const float *x = (const float *)(uintptr_t)s->x[k] + at;
    return d ? s->v->displacement(p, x, d, n, place) : s->v->load(p, x, n, place);
}

static void add_to_partition(const Pieces *s, int partition, Stats stats) {
#ifdef _OPENMP
#pragma omp critical
#endif
    {
        s->sums[partition] += stats.sum;
        if (s->largest && stats.largest > s->largest[partition]) s->largest[partition] = stats.largest;
    }
}

static void share_pieces(const Pieces *s, int64_t *next) {
    Stats stats = {0, 0};
    int64_t index = 0, mine = claim(next);
    for (int k = 0; k < s->pieces; k++) {
        for (int64_t at = 0; at < s->count[k]; at += UNIT, index++) {
            if (index != mine) continue;
            mine = claim(next);
            const Stats more = unit_of(s, k, at);
            stats.sum += more.sum;
            stats.largest = more.largest > stats.largest ? more.largest : stats.largest;
        }
        if (k + 1 == s->pieces || s->partition[k + 1] != s->partition[k]) {
            add_to_partition(s, s->partition[k], stats);
            stats.sum = 0, stats.largest = 0;
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
                          const int64_t *count, const int64_t *place, const int32_t *partition, uint64_t *sums, uint32_t *largest) {
    const Pieces s = {PASSES_OF + variant, pieces, p, x, d, count, place, partition, sums, largest};
    pass_pieces(&s, threads);
}

EXPORT void tailopt_load(int variant, int threads, int pieces, const uint64_t *p, const uint64_t *x, const int64_t *count,
                         const int64_t *place, const int32_t *partition, uint64_t *sums) {
    const Pieces s = {PASSES_OF + variant, pieces, p, x, NULL, count, place, partition, sums, NULL};
    pass_pieces(&s, threads);
}

EXPORT void tailopt_mean(int variant, int threads, const uint64_t *rows, const float *shares, int nodes, float whole,
                         int negative, void *out, int64_t n) {
    const Passes *v = PASSES_OF + variant;
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
    const Passes *best = PASSES_OF + variant;
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
    const Passes *v = PASSES_OF + variant;
    for (int k = 0; k < pieces; k++) {
        const Limit l = {(float)a[k], (float)c[k], slack, ulps, type_of(dtype[k])};
        const int64_t n = count[k];
        Beyond worst = {-1, 0, 0};
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (n >= SERIAL && threads > 1)
#endif
        for (int64_t from = 0; from < n; from += UNIT) {
            Beyond here = {-1, 0, 0};
            v->beyond((const float *)(uintptr_t)d[k] + from, (const char *)(uintptr_t)x[k] + from * size_of(dtype[k]), dtype[k],
                      n - from < UNIT ? n - from : UNIT, &l, &here);
            if (here.at < 0) continue;
            here.at += from;
#ifdef _OPENMP
#pragma omp critical
#endif
            if (worst.at < 0 || here.excess > worst.excess || (here.excess == worst.excess && here.at < worst.at)) worst = here;
        }
        at[k] = worst.at, most[k] = worst.allowed;
    }
}

/* Block by block: the sum of squares of the units in the last place of max(|x|, b), or -1 where it depends on the order. */
EXPORT void tailopt_ulp_squares(int variant, int threads, const void *x, int dtype, int64_t n, double b, double *sums) {
    const Passes *v = PASSES_OF + variant;
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads) if (n >= SERIAL && threads > 1)
#endif
    for (int64_t at = 0; at < n; at += BLOCK)
        sums[at / BLOCK] = v->ulp_squares((const char *)x + at * size_of(dtype), dtype, n - at < BLOCK ? n - at : BLOCK, (float)b);
}
