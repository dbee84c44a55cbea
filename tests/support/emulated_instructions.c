// Instructions that this processor lacks, emulated where they trap: AVX-VNNI's VPDPBUSD and AMX, as in Intel's manual for
// developers, volume 2. Whatever else is illegal, or an operand that the manual forbids, goes to the handler before.
#define _GNU_SOURCE
#include <immintrin.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

struct tiles {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
  uint8_t data[8][16][64];
};
static __thread struct tiles tiles;  // all zero: not configured
static struct sigaction before;
static long emulated;

static const int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

struct instruction {
  int map, prefix, wide, is_256, opcode, mod, reg, rm, vvvv;
  uint8_t *address;
  int64_t index;  // scaled
  int has_index;
  const uint8_t *end;
};

// Of three-byte VEX. Returns 0 for others.
static int decode(const uint8_t *p, const greg_t *registers, struct instruction *i) {
  if (p[0] != 0xc4) return 0;
  const int r = ~p[1] >> 7 & 1, x = ~p[1] >> 6 & 1, b = ~p[1] >> 5 & 1;
  *i = (struct instruction){.map = p[1] & 31, .prefix = p[2] & 3, .wide = p[2] >> 7, .is_256 = p[2] >> 2 & 1,
                            .vvvv = ~p[2] >> 3 & 15, .opcode = p[3], .mod = p[4] >> 6,
                            .reg = (p[4] >> 3 & 7) | r << 3, .rm = (p[4] & 7) | b << 3};
  const int rm = p[4] & 7;
  p += 5;
  if (i->mod != 3) {
    int64_t address = 0;
    int32_t offset = 0, size = i->mod == 0 ? 0 : i->mod == 1 ? 1 : 4;
    if (rm == 4) {
      const int base = *p & 7, index = (*p >> 3 & 7) | x << 3;
      if (base == 5 && i->mod == 0) size = 4;
      else address = registers[REGISTERS[base | b << 3]];
      i->has_index = index != 4;
      if (i->has_index) i->index = registers[REGISTERS[index]] << (*p >> 6);
      p++;
    } else if (rm == 5 && i->mod == 0) {
      size = 4, address = (int64_t)p + 4;  // of the next instruction: no immediate follows
    } else {
      address = registers[REGISTERS[i->rm]];
    }
    if (size == 1) offset = (int8_t)*p;
    if (size == 4) memcpy(&offset, p, 4);
    i->address = (uint8_t *)(address + offset), p += size;
  }
  i->end = p;
  return 1;
}

static int is_tile(int tile) { return tile < 8 && tiles.palette == 1 && tiles.rows[tile] && tiles.row_bytes[tile]; }

static int configure(const uint8_t *memory) {
  struct tiles new = {0};
  memcpy(&new, memory, 64);
  if (new.palette > 1) return 0;
  for (int i = 0; i < 16; i++) {
    if (i < 14 && new.reserved[i]) return 0;
    if (i >= 8 && (new.rows[i] || new.row_bytes[i])) return 0;
    if (new.rows[i] > 16 || new.row_bytes[i] > 64 || !new.rows[i] != !new.row_bytes[i]) return 0;
  }
  tiles = new;
  return 1;
}

static int load_or_store(const struct instruction *i, int is_store) {
  if (!is_tile(i->reg) || !i->has_index) return 0;
  if (!is_store) memset(tiles.data[i->reg], 0, sizeof(tiles.data[0]));
  for (int row = 0; row < tiles.rows[i->reg]; row++) {
    uint8_t *memory = i->address + row * i->index, *tile = tiles.data[i->reg][row];
    memcpy(is_store ? memory : tile, is_store ? tile : memory, tiles.row_bytes[i->reg]);
  }
  return 1;
}

static float bf16(const uint8_t *row, int place) {
  uint32_t bits = (uint32_t)((const uint16_t *)row)[place] << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static void multiply_bf16(float *sums, const uint8_t *x, const uint8_t (*w)[64], int steps) {
  float even[16] = {0}, odd[16] = {0};
  for (int k = 0; k < steps; k++)
    for (int n = 0; n < 16; n++) {
      even[n] = __builtin_fmaf(bf16(x, 2 * k), bf16(w[k], 2 * n), even[n]);
      odd[n] = __builtin_fmaf(bf16(x, 2 * k + 1), bf16(w[k], 2 * n + 1), odd[n]);
    }
  for (int n = 0; n < 16; n++) sums[n] += even[n] + odd[n];
}

static void multiply_bytes(uint32_t *sums, const uint8_t *x, const uint8_t (*w)[64], int steps, int x_signed, int w_signed) {
  for (int k = 0; k < steps; k++)
    for (int n = 0; n < 16; n++)
      for (int b = 0; b < 4; b++) {
        const uint8_t a = x[4 * k + b], c = w[k][4 * n + b];
        sums[n] += (uint32_t)((x_signed ? (int8_t)a : a) * (w_signed ? (int8_t)c : c));
      }
}

static int multiply(const struct instruction *i) {
  const int sum = i->reg, x = i->rm, w = i->vvvv;
  if (i->mod != 3 || !is_tile(sum) || !is_tile(x) || !is_tile(w) || sum == x || sum == w || x == w) return 0;
  const int steps = tiles.rows[w];
  if (tiles.rows[sum] != tiles.rows[x] || tiles.row_bytes[x] != steps * 4 || tiles.row_bytes[sum] != tiles.row_bytes[w])
    return 0;
  if (i->opcode == 0x5c && i->prefix != 2) return 0;
  for (int row = 0; row < tiles.rows[sum]; row++) {
    uint8_t sums[64];
    memcpy(sums, tiles.data[sum][row], 64);
    if (i->opcode == 0x5c)
      multiply_bf16((float *)sums, tiles.data[x][row], tiles.data[w], steps);
    else  // SSD is F2, SUD F3, USD 66, UUD none
      multiply_bytes((uint32_t *)sums, tiles.data[x][row], tiles.data[w], steps, i->prefix >= 2, i->prefix & 1);
    memcpy(tiles.data[sum][row], sums, tiles.row_bytes[sum]);
  }
  return 1;
}

static int amx(const struct instruction *i) {
  if (i->opcode == 0x49 && i->prefix == 0) {
    if (i->mod != 3) return i->reg == 0 && configure(i->address);
    memset(&tiles, 0, sizeof(tiles));  // TILERELEASE
    return i->reg == 0 && i->rm == 0;
  }
  if (i->opcode == 0x49 && i->prefix == 3 && i->mod == 3 && is_tile(i->reg)) {
    memset(tiles.data[i->reg], 0, sizeof(tiles.data[0]));
    return 1;
  }
  if (i->opcode == 0x4b && i->mod != 3 && i->prefix) return load_or_store(i, i->prefix == 2);
  return (i->opcode == 0x5e || i->opcode == 0x5c) && multiply(i);
}

// The upper halves of the registers follow the header of XSAVE, 576 bytes from the start.
static int vpdpbusd(const struct instruction *i, uint8_t *saved) {
  uint64_t *parts = (uint64_t *)(saved + 512);
  if (i->mod != 3 || i->prefix != 1 || !i->is_256) return 0;
  if (!(*parts & 4)) memset(saved + 576, 0, 256), *parts |= 6;
  for (int half = 0; half < 2; half++) {
    uint8_t *registers = saved + (half ? 576 : 160);
    uint32_t *sums = (uint32_t *)(registers + 16 * i->reg);
    const uint8_t *u8 = registers + 16 * i->vvvv, *s8 = registers + 16 * i->rm;
    uint32_t added[4] = {0};
    for (int b = 0; b < 16; b++) added[b / 4] += (uint32_t)(u8[b] * (int8_t)s8[b]);
    for (int n = 0; n < 4; n++) sums[n] += added[n];
  }
  return 1;
}

static int emulate(mcontext_t *machine) {
  struct instruction i;
  if (!decode((const uint8_t *)machine->gregs[REG_RIP], machine->gregs, &i) || i.map != 2 || i.wide) return 0;
  if (!(i.opcode == 0x50 ? vpdpbusd(&i, (uint8_t *)machine->fpregs) : !i.is_256 && amx(&i))) return 0;
  machine->gregs[REG_RIP] = (greg_t)i.end;
  return 1;
}

static void handle(int number, siginfo_t *info, void *context) {
  mcontext_t *machine = &((ucontext_t *)context)->uc_mcontext;
  long added = 0;
  _mm_setcsr(_mm_getcsr() | 0x8040);  // denormals are zero, as operands and as results
  while (emulate(machine)) added++;   // those that follow too, as a trap takes microseconds
  if (!added) sigaction(SIGILL, &before, NULL);  // raised again by the same instruction
  __atomic_add_fetch(&emulated, added, __ATOMIC_RELAXED);
  (void)number, (void)info;
}

int install(void) {
  struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO};
  return sigaction(SIGILL, &action, &before);
}
long count(void) { return __atomic_load_n(&emulated, __ATOMIC_RELAXED); }
