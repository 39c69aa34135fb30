/* AMX tiles in C, after Intel's instruction reference: state per thread, faults counted instead of raised. */
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

typedef struct {
  int configured;
  int rows[8], bytes[8];
  uint8_t data[8][16][64];
} tiles;

static __thread tiles here;
atomic_int tvmx_emulated_faults, tvmx_emulated_live, tvmx_emulated_products;

static int bad(int wrong) {
  if (wrong) tvmx_emulated_faults++;
  return wrong;
}

void tvmx_emulated_ldtilecfg(const uint8_t* memory) {
  if (bad(memory[0] != 1 || memory[1] != 0)) return;
  if (!here.configured) tvmx_emulated_live++;
  memset(&here, 0, sizeof(here));
  here.configured = 1;
  for (int t = 0; t < 8; t++) {
    here.bytes[t] = memory[16 + 2 * t] | memory[17 + 2 * t] << 8;
    here.rows[t] = memory[48 + t];
    bad(here.rows[t] > 16 || here.bytes[t] > 64 || !here.rows[t] != !here.bytes[t]);
  }
  for (int k = 2; k < 64; k++) /* reserved bytes */
    if ((k < 16 || (k >= 32 && k < 48) || k >= 56)) bad(memory[k] != 0);
}

void tvmx_emulated_tilerelease(void) {
  if (here.configured) tvmx_emulated_live--;
  memset(&here, 0, sizeof(here));
}

void tvmx_emulated_tileloadd64(int8_t t, const uint8_t* base, int64_t stride) {
  if (bad(!here.configured || !here.rows[t])) return;
  memset(here.data[t], 0, sizeof(here.data[t]));
  for (int r = 0; r < here.rows[t]; r++) memcpy(here.data[t][r], base + r * stride, here.bytes[t]);
}

void tvmx_emulated_tilestored64(int8_t t, uint8_t* base, int64_t stride) {
  if (bad(!here.configured || !here.rows[t])) return;
  for (int r = 0; r < here.rows[t]; r++) memcpy(base + r * stride, here.data[t][r], here.bytes[t]);
}

static void product(int c, int a, int b, int is_signed) {
  if (bad(!here.configured || c == a || c == b || a == b)) return;
  if (bad(here.rows[c] != here.rows[a] || here.bytes[c] != here.bytes[b] || here.bytes[a] != here.rows[b] * 4)) return;
  for (int m = 0; m < here.rows[c]; m++)
    for (int k = 0; k < here.bytes[a] / 4; k++)
      for (int n = 0; n < here.bytes[b] / 4; n++) {
        int32_t sum;
        memcpy(&sum, &here.data[c][m][4 * n], 4);
        for (int i = 0; i < 4; i++) {
          uint8_t x = here.data[a][m][4 * k + i];
          sum += (is_signed ? (int8_t)x : x) * (int8_t)here.data[b][k][4 * n + i];
        }
        memcpy(&here.data[c][m][4 * n], &sum, 4);
      }
  tvmx_emulated_products++;
}

void tvmx_emulated_tdpbusd(int8_t c, int8_t a, int8_t b) { product(c, a, b, 0); }
void tvmx_emulated_tdpbssd(int8_t c, int8_t a, int8_t b) { product(c, a, b, 1); }
