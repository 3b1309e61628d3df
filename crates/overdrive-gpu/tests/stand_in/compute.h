// What the kernels compute, for f32 on the CPU, in plain loops: SiLU for gates, pairs of halves for rotations, queries
// and keys of unit length for the delta rule.
#include <math.h>

#define FLOATS(i) (*(float**)p[i])
#define INTEGER(i) (*(int32_t*)p[i])
#define LONG(i) (*(long long*)p[i])
#define NUMBER(i) (*(float*)p[i])

static void norm_forward(int add, void** p) {
  const float *x = FLOATS(0), *residual = add ? FLOATS(1) : NULL, *weight = FLOATS(1 + add);
  float *y = FLOATS(2 + add), *total = add ? FLOATS(4) : NULL, *inverse = FLOATS(3 + 2 * add);
  int rows = INTEGER(4 + 2 * add), width = INTEGER(5 + 2 * add);
  double eps = NUMBER(6 + 2 * add);
  for (int r = 0; r < rows; ++r) {
    const float* row = x + (long)r * width;
    if (add) {
      for (int c = 0; c < width; ++c) total[(long)r * width + c] = row[c] + residual[(long)r * width + c];
      row = total + (long)r * width;
    }
    double squares = 0;
    for (int c = 0; c < width; ++c) squares += (double)row[c] * row[c];
    inverse[r] = (float)(1 / sqrt(squares / width + eps));
    for (int c = 0; c < width; ++c) y[(long)r * width + c] = row[c] * inverse[r] * weight[c];
  }
}

static void norm_backward(int add, unsigned programs, void** p) {
  const float *x = FLOATS(0), *weight = FLOATS(1), *inverse = FLOATS(2), *dy = FLOATS(3);
  const float* extra = add ? FLOATS(4) : NULL;
  float *dx = FLOATS(4 + add), *partial = FLOATS(5 + add);
  int rows = INTEGER(6 + add), width = INTEGER(7 + add);
  memset(partial, 0, sizeof(float) * programs * (size_t)width);
  for (int r = 0; r < rows; ++r) {
    long at = (long)r * width;
    double mean = 0;
    for (int c = 0; c < width; ++c) mean += (double)dy[at + c] * weight[c] * x[at + c] * inverse[r] / width;
    for (int c = 0; c < width; ++c) {
      float normalised = x[at + c] * inverse[r];
      dx[at + c] = (float)((dy[at + c] * weight[c] - normalised * mean) * inverse[r]) + (add ? extra[at + c] : 0);
      partial[(long)(r % (int)programs) * width + c] += dy[at + c] * normalised;
    }
  }
}

static void glu(int backward, unsigned rows, void** p) {
  const float *gate = FLOATS(0), *up = FLOATS(1);
  int width = INTEGER(backward ? 5 : 3), stride = INTEGER(backward ? 6 : 4);
  for (unsigned r = 0; r < rows; ++r) {
    for (int c = 0; c < width; ++c) {
      long at = (long)r * stride + c, dense = (long)r * width + c;
      double share = 1 / (1 + exp(-gate[at])), a = gate[at];
      if (!backward) {
        FLOATS(2)[dense] = (float)(a * share * up[at]);
      } else {
        float dy = FLOATS(2)[dense];
        FLOATS(3)[at] = (float)(dy * up[at] * share * (1 + a * (1 - share)));
        FLOATS(4)[at] = (float)(dy * a * share);
      }
    }
  }
}

// Copies a head and turns its pairs.
static void turn(const float* x, float* y, const float* cos, const float* sin, float sign, int pairs, int dim) {
  memcpy(y, x, sizeof(float) * (size_t)dim);
  for (int i = 0; i < pairs && cos; ++i) {
    y[i] = x[i] * cos[i] - x[pairs + i] * sign * sin[i];
    y[pairs + i] = x[pairs + i] * cos[i] + x[i] * sign * sin[i];
  }
}

static void split(unsigned tokens, void** p) {
  int length = INTEGER(6), q_heads = INTEGER(7), kv_heads = INTEGER(8), dim = INTEGER(9), pairs = INTEGER(10);
  for (unsigned t = 0; t < tokens; ++t) {
    long table = (t / (unsigned)length) * LONG(11) + (long)(t % (unsigned)length) * pairs;
    const float* x = FLOATS(0) + (long)t * (q_heads + 2 * kv_heads) * dim;
    for (int part = 0; part < 3; ++part) {
      int heads = part == 0 ? q_heads : kv_heads;
      for (int h = 0; h < heads; ++h, x += dim) {
        float* y = FLOATS(1 + part) + ((long)t * heads + h) * dim;
        turn(x, y, part < 2 ? FLOATS(4) + table : NULL, FLOATS(5) + table, 1, pairs, dim);
      }
    }
  }
}

static void join(unsigned tokens, void** p) {
  int length = INTEGER(6), dim = INTEGER(10), pairs = INTEGER(11);
  float* y = FLOATS(3);
  for (unsigned t = 0; t < tokens; ++t) {
    long sequence = t / (unsigned)length, position = t % (unsigned)length;
    long table = sequence * LONG(12) + position * pairs;
    for (int part = 0; part < 3; ++part) {
      for (int h = 0; h < INTEGER(7 + part); ++h, y += dim) {
        int strides = 13 + 3 * part;
        const float* x = FLOATS(part) + sequence * LONG(strides) + position * LONG(strides + 1) + h * LONG(strides + 2);
        turn(x, y, part < 2 ? FLOATS(4) + table : NULL, FLOATS(5) + table, NUMBER(22), pairs, dim);
      }
    }
  }
}

static void entropy(int both, unsigned rows, void** p) {
  int base = both ? 3 : 4, classes = INTEGER(base);
  float smoothing = NUMBER(base + 2), z_loss = NUMBER(base + 3), cap = NUMBER(base + 4), scale = NUMBER(base + 5);
  // The launcher scales by 0 where only the losses are wanted.
  int find = both || scale == 0, write = both || !find;
  if (!find) scale *= FLOATS(3)[0];
  for (unsigned r = 0; r < rows; ++r) {
    float* row = FLOATS(0) + (long)r * classes;
    long long label = (*(long long**)p[1])[r];
    int counts = label != LONG(base + 1);
    double sum = 0, mean = 0;
    for (int c = 0; c < classes; ++c) {
      double x = cap != 0 ? cap * tanh(row[c] / cap) : row[c];
      sum += exp(x);
      mean += x / classes;
    }
    double lse = find ? log(sum) : FLOATS(2)[r];
    if (find) {
      double x = !counts ? 0 : cap != 0 ? cap * tanh(row[label] / cap) : row[label];
      FLOATS(2)[r] = counts ? (float)(lse - (1 - smoothing) * x + z_loss * lse * lse - smoothing * mean) : 0;
      if (!both) FLOATS(3)[r] = counts ? (float)lse : 0;
    }
    for (int c = 0; c < classes && write; ++c) {
      double x = cap != 0 ? cap * tanh(row[c] / cap) : row[c];
      double gradient = exp(x - lse) * (1 + 2 * z_loss * lse) - smoothing / classes - (c == label ? 1 - smoothing : 0);
      if (cap != 0) gradient *= 1 - x / cap * (x / cap);
      row[c] = counts ? (float)(gradient * scale) : 0;
    }
  }
}

static int nearest(float value, const float* bounds) {
  int code = 0;
  while (code < 255 && bounds[code] < value) ++code;
  return code;
}

static void adam(void** p) {
  float *parameter = FLOATS(0), *gradient = FLOATS(1);
  long long count = LONG(10);
  for (long long start = 0; start < count; start += 256) {
    int n = count - start < 256 ? (int)(count - start) : 256;
    float average[2][256], largest[2] = {0, 0};
    for (int which = 0; which < 2; ++which) {
      unsigned char* codes = *(unsigned char**)p[2 + which] + start;
      float *scale = FLOATS(4 + which) + start / 256, *book = FLOATS(6 + 2 * which);
      for (int i = 0; i < n; ++i) {
        float g = gradient[start + i];
        float value = book[codes[i]] * *scale * NUMBER(11 + which) + NUMBER(13 + which) * (which ? g * g : g);
        average[which][i] = value;
        largest[which] = fmaxf(largest[which], fabsf(value));
      }
      *scale = largest[which];
      float inverse = largest[which] > 1.2e-38f ? 1 / largest[which] : 0;
      for (int i = 0; i < n; ++i) codes[i] = (unsigned char)nearest(average[which][i] * inverse, FLOATS(7 + 2 * which));
    }
    for (int i = 0; i < n; ++i) {
      float update = average[0][i] / (sqrtf(average[1][i]) * NUMBER(17) + NUMBER(18));
      parameter[start + i] = parameter[start + i] * NUMBER(15) - NUMBER(16) * update;
    }
  }
}

#define INTEGERS(i) (*(int32_t**)p[i])
#define BYTES(i) (*(unsigned char**)p[i])

// The tensors and numbers of a decode attention.
typedef struct {
  const float *key_lines, *value_lines, *keys, *values;
  const unsigned char *key_codes, *value_codes;
  const int32_t *table, *key_starts;
  int coded, capacity, kv_heads, dim, block_size;
  long long strides[2][3];
} Decode;

// Returns channel `c` of a key, or of a value, with codes of 64 tokens or 64 channels.
static float decode_number(const Decode* d, int value, int sequence, int head, int token, int c) {
  long long line = (long long)sequence * d->kv_heads + head;
  if (token < d->coded) {
    int code = (value ? d->value_codes : d->key_codes)[(line * d->capacity + token) * d->dim + c];
    int n = value ? d->dim / 64 : d->dim;
    const float* numbers = value ? d->value_lines + (line * d->capacity + token) * 2 * n + c / 64
                                 : d->key_lines + (line * d->capacity + token) / 64 * 2 * n + c;
    return (float)code * numbers[0] + numbers[n];
  }
  const long long* stride = d->strides[value];
  long long first = sequence, row = token - d->coded;
  if (d->table) {
    int slot = d->key_starts[sequence] + token;
    first = d->table[slot / d->block_size];
    row = slot % d->block_size;
  }
  return (value ? d->values : d->keys)[first * stride[0] + head * stride[1] + row * stride[2] + c];
}

// Returns the place of the logarithm of a row of a split. Those of one split lie as in the results, (heads, total): the
// arguments do not tell the kernel that writes the results from the one that leaves them to `combine`.
static long long decode_place(int splits, int split, int total, int heads, int token, int head) {
  return splits == 1 ? (long long)head * total + token : ((long long)split * total + token) * heads + head;
}

// Key `j` goes to split `j % splits`.
static void decode(int count, unsigned programs, unsigned splits, void** p) {
  int paged = count == 30, coded = count == 31, i = 5;
  Decode d = {.keys = FLOATS(1), .values = FLOATS(2)};
  const int32_t *counts = coded ? NULL : INTEGERS(i++), *query_starts = NULL;
  if (paged) d.table = INTEGERS(i++), d.key_starts = INTEGERS(i++), query_starts = INTEGERS(i++);
  if (coded) d.key_codes = BYTES(i++), d.value_codes = BYTES(i++), d.key_lines = FLOATS(i++), d.value_lines = FLOATS(i++);
  int queries = INTEGER(i++), total = INTEGER(i++), room = INTEGER(i++);
  if (coded) d.coded = INTEGER(i++), d.capacity = INTEGER(i++);
  d.kv_heads = INTEGER(i++);
  int group = INTEGER(i++), dim = d.dim = INTEGER(i++), heads = d.kv_heads * group;
  if (paged) d.block_size = INTEGER(i++);
  long long q_row = LONG(i++), q_head = LONG(i++);
  for (int at = 0; at < 6; ++at) d.strides[at / 3][at % 3] = LONG(i++);
  int left = INTEGER(i++), right = INTEGER(i++);
  double scale = NUMBER(i++), softcap = NUMBER(i++);
  int sequences = (int)programs / d.kv_heads / ((queries * group + 15) / 16);
  for (int s = 0; s < sequences; ++s) {
    int first = paged ? query_starts[s] : s * queries, here = paged ? query_starts[s + 1] - first : queries;
    int keys = counts && counts[s] < room ? counts[s] : room;
    for (int at = 0; at < here * heads * (int)splits; ++at) {
      int t = at / heads / (int)splits, h = at / (int)splits % heads, split = at % (int)splits;
      const float* q = FLOATS(0) + (first + t) * q_row + h * q_head;
      long long row = ((long long)split * total + first + t) * heads + h;
      double weight = 0, highest = -INFINITY, *sums = calloc((size_t)dim, sizeof(double));
      for (int j = split; j < keys; j += (int)splits) {
        int position = keys - here + t;
        if (j < position - left || j > position + right) continue;
        double score = 0;
        for (int c = 0; c < dim; ++c) score += (double)q[c] * decode_number(&d, 0, s, h / group, j, c);
        score *= scale;
        if (softcap > 0) score = softcap * tanh(score / softcap);
        double now = score > highest ? score : highest, factor = exp(highest - now), share = exp(score - now);
        for (int c = 0; c < dim; ++c) sums[c] = sums[c] * factor + share * decode_number(&d, 1, s, h / group, j, c);
        weight = weight * factor + share;
        highest = now;
      }
      long long place = decode_place((int)splits, split, total, heads, first + t, h);
      FLOATS(4)[place] = (float)(weight > 0 ? highest + log(weight) : -INFINITY);
      for (int c = 0; c < dim; ++c) FLOATS(3)[row * dim + c] = weight > 0 ? (float)(sums[c] / weight) : 0;
      free(sums);
    }
  }
}

static void combine(int sinks, unsigned total, unsigned heads, void** p) {
  int splits = INTEGER(4 + sinks), dim = INTEGER(5 + sinks);
  for (unsigned row = 0; row < total * heads; ++row) {
    unsigned head = row % heads;
    double highest = sinks ? FLOATS(2)[head] : -INFINITY, weight;
    const float* each = FLOATS(1);
    int token = (int)(row / heads);
#define PLACE(s) decode_place(splits, s, (int)total, (int)heads, token, (int)head)
    for (int s = 0; s < splits; ++s) highest = fmax(highest, each[PLACE(s)]);
    double base = isinf(highest) ? 0 : highest;
    weight = sinks ? exp(FLOATS(2)[head] - base) : 0;
    for (int s = 0; s < splits; ++s) weight += exp(each[PLACE(s)] - base);
    FLOATS(3 + sinks)[head * total + row / heads] = (float)(weight > 0 ? base + log(weight) : -INFINITY);
    for (int c = 0; c < dim; ++c) {
      double sum = 0;
      for (int s = 0; s < splits; ++s) {
        long at = (long)s * total * heads + row;
        sum += exp(each[PLACE(s)] - base) * FLOATS(0)[at * dim + c];
      }
      FLOATS(2 + sinks)[(long)row * dim + c] = weight > 0 ? (float)(sum / weight) : 0;
    }
#undef PLACE
  }
}

// Copies heads of tokens to rows of blocks.
static void write_rows(unsigned tokens, unsigned heads, void** p) {
  int dim = INTEGER(6);
  for (int which = 0; which < 2; ++which) {
    const float* from = FLOATS(which);
    float* pool = FLOATS(2 + which);
    for (unsigned at = 0; at < tokens * heads; ++at) {
      long long token = at / heads, head = at % heads;
      long long block = (*(int64_t**)p[4])[token], row = (*(int64_t**)p[5])[token];
      const float* source = from + token * LONG(7 + 2 * which) + head * LONG(8 + 2 * which);
      float* target = pool + block * LONG(11 + 3 * which) + head * LONG(12 + 3 * which) + row * LONG(13 + 3 * which);
      memcpy(target, source, (size_t)dim * sizeof(float));
    }
  }
}

// Returns the first token of a sequence in a plan, its end, and the slots of its state before and after.
static void plan_of(const int32_t* plan, int sequences, int sequence, long* found) {
  found[0] = plan[sequence], found[1] = plan[sequence + 1];
  found[2] = plan[sequences + 1 + sequence], found[3] = plan[2 * sequences + 1 + sequence];
}

static void convolve(void** p) {
  const float *x = FLOATS(0), *weight = FLOATS(1);
  float *states = FLOATS(2), *y = FLOATS(4);
  int sequences = INTEGER(5), channels = INTEGER(6);
  for (int s = 0; s < sequences; ++s) {
    long at[4];
    plan_of(INTEGERS(3), sequences, s, at);
    for (long c = 0; c < channels; ++c) {
      float window[4] = {0, 0, 0, 0};
      for (int tap = 0; tap < 3 && at[2] >= 0; ++tap) window[1 + tap] = states[(at[2] * channels + c) * 3 + tap];
      for (long t = at[0]; t < at[1]; ++t) {
        memmove(window, window + 1, sizeof(float) * 3);
        window[3] = x[t * LONG(7) + c];
        double sum = 0;
        for (int tap = 0; tap < 4; ++tap) sum += (double)window[tap] * weight[c * 4 + tap];
        y[t * channels + c] = (float)(sum / (1 + exp(-sum)));
      }
      memcpy(states + (at[3] * channels + c) * 3, window + 1, sizeof(float) * 3);
    }
  }
}

// Writes a row divided by its length, as the kernel does if it is told to.
static void unit(const float* x, double* y, int dim, double scale) {
  double squares = 1e-6;
  for (int i = 0; i < dim; ++i) squares += (double)x[i] * x[i];
  for (int i = 0; i < dim; ++i) y[i] = x[i] / sqrt(squares) * scale;
}

static void delta(void** p) {
  const float *decay = FLOATS(3), *beta = FLOATS(4);
  float *states = FLOATS(5), *y = FLOATS(7);
  int sequences = INTEGER(8), heads = INTEGER(9), keys = INTEGER(11), values = INTEGER(12);
  double q[256], k[256], state[256];
  for (int s = 0; s < sequences; ++s) {
    long at[4];
    plan_of(INTEGERS(6), sequences, s, at);
    // A column of the state of a head at a time.
    for (long h = 0; h < heads; ++h) for (int c = 0; c < values; ++c) {
      long key_head = h / INTEGER(10);
      for (int r = 0; r < keys; ++r) state[r] = at[2] < 0 ? 0 : states[((at[2] * heads + h) * keys + r) * values + c];
      for (long t = at[0]; t < at[1]; ++t) {
        unit(FLOATS(0) + t * LONG(13) + key_head * LONG(14), q, keys, NUMBER(19));
        unit(FLOATS(1) + t * LONG(15) + key_head * LONG(16), k, keys, 1);
        double held = 0, out = 0, g = exp(decay[t * heads + h]);
        for (int r = 0; r < keys; ++r) held += (state[r] *= g) * k[r];
        double change = (FLOATS(2)[t * LONG(17) + h * LONG(18) + c] - held) * beta[t * heads + h];
        for (int r = 0; r < keys; ++r) out += (state[r] += k[r] * change) * q[r];
        y[(t * heads + h) * values + c] = (float)out;
      }
      for (int r = 0; r < keys; ++r) states[((at[3] * heads + h) * keys + r) * values + c] = (float)state[r];
    }
  }
}

static int compute(const char* name, int count, unsigned blocks, unsigned blocks_y, void** p) {
  if (strcmp(name, "rms_norm_forward") == 0) norm_forward(count == 11, p);
  else if (strcmp(name, "rms_norm_backward") == 0) norm_backward(count == 11, blocks, p);
  else if (strcmp(name, "glu_forward") == 0) glu(0, blocks, p);
  else if (strcmp(name, "glu_backward") == 0) glu(1, blocks, p);
  else if (strcmp(name, "rotary_split") == 0) split(blocks, p);
  else if (strcmp(name, "rotary_join") == 0) join(blocks, p);
  else if (strcmp(name, "cross_entropy") == 0) entropy(count == 11, blocks, p);
  else if (strcmp(name, "adam8") == 0) adam(p);
  else if (strcmp(name, "decode_attention") == 0) decode(count, blocks, blocks_y, p);
  else if (strcmp(name, "decode_combine") == 0) combine(count == 9, blocks, blocks_y, p);
  else if (strcmp(name, "paged_write") == 0) write_rows(blocks, blocks_y, p);
  else if (strcmp(name, "causal_conv1d") == 0) convolve(p);
  else if (strcmp(name, "delta_rule") == 0) delta(p);
  else return 98;
  return 0;
}
