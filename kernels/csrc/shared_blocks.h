// KV blocks in memory that processes share: slots of one size, an index, and the order in which they were last used.
// Nothing in here is waited for that a process could take with it when it is killed, at whatever instruction.
//
//     │ Header: lock, order │ Attachment × 512 │ Entry × slots │ bucket × power of 2 │ … │ slot │ slot │ …
//        who holds the lock      what each process    of each slot    first entry, + 1       bytes of a block each
//        may change all of it    has its hands on
//
//     a slot    FREE ──reserve──► WRITING ──commit──► THERE ──evict, or a wrong digest──► FREE
//                                    │ its writer is gone       │ with readers: DOOMED, until the last has let go
//                                    └──────────► FREE
//
// 1. A slot's bytes are written, and read, without the lock: a slot in WRITING is its writer's alone, and one that is
//    pinned is not given away. Attachments list the slots that each process writes and has pinned.
// 2. The mutex is robust: who gets it from a process that died with it makes the buckets, the order, the free list and
//    the pins anew, from the entries' states (each is set last) and the attachments of processes that live.
// 3. What a dead process was writing, or had pinned, is let go when somebody attaches, meets such a slot, or finds none.
// 4. A block is its hash and a group (of what it depends on besides); its digest is mixed with both, so that one in
//    another's place is found as well.
//
// Zeros are a valid beginning of all but the mutex: memory that was never written takes no room.
#pragma once
#include <fcntl.h>
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "calls.h"
#include "digest.h"

namespace shared_blocks {

constexpr uint64_t MAGIC = 0x5155495245424c31;  // layout 1
constexpr int64_t HASH_BYTES = 32, GROUP_BYTES = 16;
constexpr uint32_t MAX_ATTACHMENTS = 512;
constexpr int MAX_HELD = 64;  // slots that a process may write, or have pinned, at a time
constexpr int64_t TOGETHER = 16;  // blocks for which the lock is taken once
constexpr int64_t ALIGNMENT = 4096;
constexpr double PATIENCE = 30.0;  // seconds for the lock when a process has its hands on slots, which it has to let go

enum State : uint32_t { FREE = 0, WRITING = 1, THERE = 2, DOOMED = 3 };

// What a call comes to when it is not a number of blocks.
enum Failure : int64_t { LOCKED = -1, TOO_MANY = -2, OTHER_SIZE = -3, NOT_ATTACHED = -4, NO_PROC = -5 };

struct Attachment {
  uint32_t pid;  // 0: not taken
  uint32_t padding;
  uint64_t started_at;        // of the process, as /proc has it: another process may have its number later
  uint32_t writing[MAX_HELD];  // slots, + 1; 0: none
  uint32_t pinned[MAX_HELD];
};

struct Entry {
  uint8_t hash[HASH_BYTES];
  uint8_t group[GROUP_BYTES];
  uint64_t digest[2];
  uint64_t used_at;  // counted
  uint64_t bytes;
  std::atomic<uint32_t> state;
  uint32_t writer;  // attachment
  uint32_t pins;
  uint32_t next;           // in its bucket, or in the free list; + 1
  uint32_t newer, older;  // + 1
};

struct Header {
  uint64_t magic;
  uint64_t total_bytes;
  pthread_mutex_t mutex;
  uint64_t slot_bytes;  // 0: not known yet
  uint64_t num_slots, num_buckets;
  uint64_t entries_at, buckets_at, slots_at;  // bytes from the beginning
  uint64_t num_used;                          // slots that were ever used: the first ones
  uint64_t clock;
  uint64_t num_there, num_evicted, num_damaged, num_repairs;
  uint32_t newest, oldest, free;  // slots, + 1
  uint32_t padding;
  Attachment attachments[MAX_ATTACHMENTS];
};

inline const uint8_t* hash_of(const SharedBlocksCall& call, int64_t i) {
  return static_cast<const uint8_t*>(call.hashes) + i * HASH_BYTES;
}

inline char* bytes_of(Header* header) { return reinterpret_cast<char*>(header); }
inline Entry* entries_of(Header* header) { return reinterpret_cast<Entry*>(bytes_of(header) + header->entries_at); }
inline uint32_t* buckets_of(Header* header) {
  return reinterpret_cast<uint32_t*>(bytes_of(header) + header->buckets_at);
}
inline char* slot_of(Header* header, uint64_t slot) {
  return bytes_of(header) + header->slots_at + slot * header->slot_bytes;
}

constexpr uint64_t UNKNOWN_START = UINT64_MAX;

// When a process started, in the kernel's ticks; 0: it is not there, or has ended and nobody has waited for it yet. If
// this process cannot look, as it has no descriptors left, it is unknown, and the other one counts as alive.
inline uint64_t started_at(uint32_t pid) {
  char path[32], text[1024];
  std::snprintf(path, sizeof path, "/proc/%u/stat", pid);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return errno == ENOENT || errno == ESRCH ? 0 : UNKNOWN_START;
  const ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  if (size < 0) return errno == ESRCH ? 0 : UNKNOWN_START;
  if (size == 0) return 0;
  text[size] = 0;
  char* place = std::strrchr(text, ')');  // behind its name, which may hold anything
  if (place == nullptr || place[1] == 0 || place[2] == 'Z' || place[2] == 'X') return 0;
  for (int field = 2; field < 22 && place != nullptr; field++) place = std::strchr(place + 1, ' ');
  return place == nullptr ? 0 : std::strtoull(place, nullptr, 10);
}

inline bool is_alive(uint32_t pid, uint64_t started) {
  const uint64_t now = started_at(pid);
  return now == started || now == UNKNOWN_START;
}

// -- the books, under the lock ---------------------------------------------------------------------------------------

class Books {
 public:
  explicit Books(Header* header) : header(header), entries(entries_of(header)), buckets(buckets_of(header)) {}

  uint32_t* bucket_of(const uint8_t* hash) const {
    uint64_t word;
    std::memcpy(&word, hash, 8);
    return buckets + (word & (header->num_buckets - 1));
  }

  // The slot of a block that is there or being written, + 1; 0: none.
  uint32_t find(const uint8_t* hash, const void* group) const {
    uint64_t steps = 0;
    for (uint32_t i = *bucket_of(hash); i != 0 && steps++ <= header->num_used; i = entries[i - 1].next) {
      const Entry& entry = entries[i - 1];
      if (std::memcmp(entry.hash, hash, HASH_BYTES) == 0 && std::memcmp(entry.group, group, GROUP_BYTES) == 0) return i;
    }
    return 0;
  }

  void file(uint32_t slot) {
    uint32_t* bucket = bucket_of(entries[slot].hash);
    entries[slot].next = *bucket;
    *bucket = slot + 1;
  }

  void unfile(uint32_t slot) {
    uint32_t* link = bucket_of(entries[slot].hash);
    while (*link != 0 && *link != slot + 1) link = &entries[*link - 1].next;
    if (*link != 0) *link = entries[slot].next;
  }

  void make_newest(uint32_t slot) {
    entries[slot].used_at = ++header->clock;
    entries[slot].newer = 0;
    entries[slot].older = header->newest;
    if (header->newest != 0) entries[header->newest - 1].newer = slot + 1;
    header->newest = slot + 1;
    if (header->oldest == 0) header->oldest = slot + 1;
  }

  void leave_order(uint32_t slot) {
    const Entry& entry = entries[slot];
    (entry.newer != 0 ? entries[entry.newer - 1].older : header->newest) = entry.older;
    (entry.older != 0 ? entries[entry.older - 1].newer : header->oldest) = entry.newer;
  }

  void release(uint32_t slot) {
    entries[slot].state.store(FREE, std::memory_order_release);
    entries[slot].pins = 0;
    entries[slot].next = header->free;
    header->free = slot + 1;
  }

  // A block that is there is there no more.
  void remove(uint32_t slot) {
    unfile(slot);
    leave_order(slot);
    header->num_there--;
    if (entries[slot].pins == 0) return release(slot);
    entries[slot].state.store(DOOMED, std::memory_order_release);
  }

  void abandon(uint32_t slot) {
    unfile(slot);
    release(slot);
  }

  void unpin(uint32_t slot) {
    Entry& entry = entries[slot];
    if (entry.pins > 0) entry.pins--;
    if (entry.pins == 0 && entry.state.load(std::memory_order_relaxed) == DOOMED) release(slot);
  }

  // Let go of what processes have left that are gone. Returns whether there was one.
  bool sweep() {
    bool found = false;
    for (Attachment& one : header->attachments) {
      if (one.pid == 0 || is_alive(one.pid, one.started_at)) continue;
      detach(one);
      found = true;
    }
    return found;
  }

  void detach(Attachment& one) {
    for (uint32_t& held : one.writing) {
      if (held != 0 && entries[held - 1].state.load(std::memory_order_relaxed) == WRITING) abandon(held - 1);
      held = 0;
    }
    for (uint32_t& held : one.pinned) {
      const uint32_t slot = held;
      held = 0;
      if (slot != 0) unpin(slot - 1);
    }
    one.pid = 0;
  }

  bool is_gone(uint32_t attachment) const {
    const Attachment& one = header->attachments[attachment];
    return one.pid == 0 || !is_alive(one.pid, one.started_at);
  }

  // A slot for a new block, + 1; 0: all are being written or read.
  uint32_t take_slot() {
    for (int attempt = 0; attempt < 2; attempt++) {
      if (header->free != 0) {
        const uint32_t slot = header->free;
        header->free = entries[slot - 1].next;
        return slot;
      }
      if (header->num_used < header->num_slots) return static_cast<uint32_t>(++header->num_used);
      for (uint32_t i = header->oldest; i != 0; i = entries[i - 1].newer) {
        if (entries[i - 1].pins != 0) continue;
        remove(i - 1);
        header->num_evicted++;
        header->free = entries[i - 1].next;
        return i;
      }
      if (!sweep()) break;
    }
    return 0;
  }

  // Make everything anew that follows from the entries' states and the attachments.
  void repair() {
    header->num_repairs++;
    header->newest = header->oldest = header->free = 0;
    header->num_there = 0;
    if (header->slot_bytes == 0) return;
    std::memset(buckets, 0, header->num_buckets * sizeof(uint32_t));
    std::vector<std::pair<uint64_t, uint32_t>> there;
    for (uint32_t slot = 0; slot < header->num_used; slot++) entries[slot].pins = 0;
    std::vector<bool> written(header->num_used, false);
    for (Attachment& one : header->attachments) {
      if (one.pid == 0) continue;
      if (!is_alive(one.pid, one.started_at)) {
        std::memset(static_cast<void*>(&one), 0, sizeof one);
        continue;
      }
      for (const uint32_t held : one.pinned)
        if (held != 0) entries[held - 1].pins++;
      for (const uint32_t held : one.writing)
        if (held != 0) written[held - 1] = true;
    }
    for (uint32_t slot = 0; slot < header->num_used; slot++) {
      const uint32_t state = entries[slot].state.load(std::memory_order_relaxed);
      if (state == THERE) {
        there.emplace_back(entries[slot].used_at, slot);
      } else if (state == WRITING && written[slot]) {
        file(slot);
      } else if (state == DOOMED && entries[slot].pins > 0) {
        continue;
      } else if (entries[slot].pins > 0) {
        entries[slot].state.store(DOOMED, std::memory_order_release);  // its reader has not looked at it yet
      } else {
        release(slot);
      }
    }
    std::sort(there.begin(), there.end());
    for (const auto& [used_at, slot] : there) {
      file(slot);
      make_newest(slot);
      header->num_there++;
    }
  }

  Header* header;
  Entry* entries;
  uint32_t* buckets;
};

// -- the lock --------------------------------------------------------------------------------------------------------

class Locked {
 public:
  Locked(Header* header, double seconds) : header(header) {
    int result = pthread_mutex_trylock(&header->mutex);
    if (result == EBUSY) {
      timespec until;
      clock_gettime(CLOCK_MONOTONIC, &until);
      const int64_t nanoseconds = until.tv_nsec + static_cast<int64_t>(seconds * 1e9);
      until.tv_sec += nanoseconds / 1000000000;
      until.tv_nsec = nanoseconds % 1000000000;
      result = pthread_mutex_clocklock(&header->mutex, CLOCK_MONOTONIC, &until);
    }
    is_held = result == 0 || result == EOWNERDEAD;
    if (result != EOWNERDEAD) return;
    Books(header).repair();
    pthread_mutex_consistent(&header->mutex);
  }
  ~Locked() {
    if (is_held) pthread_mutex_unlock(&header->mutex);
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

  Header* header;
  bool is_held;
};

inline uint32_t* free_place(uint32_t* held) {
  for (int i = 0; i < MAX_HELD; i++)
    if (held[i] == 0) return held + i;
  return nullptr;
}

inline void let_go(uint32_t* held, uint32_t slot) {
  for (int i = 0; i < MAX_HELD; i++)
    if (held[i] == slot + 1) {
      held[i] = 0;
      return;
    }
}

// -- what can be asked for -------------------------------------------------------------------------------------------

// Whoever calls this holds a lock on the file, and is alone.
inline int64_t attach(Header* header, int64_t total_bytes, double seconds) {
  if (header->magic != MAGIC) {
    std::memset(static_cast<void*>(header), 0, sizeof(Header));
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&header->mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    header->total_bytes = static_cast<uint64_t>(total_bytes);
    std::atomic_thread_fence(std::memory_order_release);
    header->magic = MAGIC;
  }
  const Locked locked(header, seconds);
  if (!locked.is_held) return LOCKED;
  if (header->slot_bytes != 0) Books(header).sweep();
  const uint32_t pid = static_cast<uint32_t>(getpid());
  const uint64_t own_start = started_at(pid);
  if (own_start == 0 || own_start == UNKNOWN_START) return NO_PROC;
  for (uint32_t i = 0; i < MAX_ATTACHMENTS; i++) {
    Attachment& one = header->attachments[i];
    if (one.pid != 0 && (header->slot_bytes != 0 || is_alive(one.pid, one.started_at))) continue;
    std::memset(static_cast<void*>(&one), 0, sizeof one);
    one.started_at = own_start;
    std::atomic_thread_fence(std::memory_order_release);
    one.pid = pid;
    return i;
  }
  return TOO_MANY;
}

inline int64_t detach(Header* header, int64_t attachment, double seconds) {
  const Locked locked(header, seconds);
  if (!locked.is_held) return LOCKED;
  Books(header).detach(header->attachments[attachment]);
  return 0;
}

// Divides the memory into slots, unless that is done. Returns how many there are.
inline int64_t divide(Header* header, int64_t block_bytes, double seconds) {
  const Locked locked(header, seconds);
  if (!locked.is_held) return LOCKED;
  const uint64_t slot_bytes = (static_cast<uint64_t>(block_bytes) + 63) / 64 * 64;
  if (header->slot_bytes != 0)
    return header->slot_bytes == slot_bytes ? static_cast<int64_t>(header->num_slots) : OTHER_SIZE;
  const uint64_t entries_at = (sizeof(Header) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  uint64_t slots = header->total_bytes / (slot_bytes + sizeof(Entry));
  uint64_t buckets = 1, buckets_at = 0, slots_at = 0;
  for (;; slots--) {
    for (buckets = 1; buckets < slots; buckets *= 2) continue;
    buckets_at = entries_at + slots * sizeof(Entry);
    slots_at = (buckets_at + buckets * sizeof(uint32_t) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (slots == 0 || slots_at + slots * slot_bytes <= header->total_bytes) break;
  }
  if (slots == 0) return 0;
  header->num_slots = std::min<uint64_t>(slots, UINT32_MAX - 1);
  header->num_buckets = buckets;
  header->entries_at = entries_at;
  header->buckets_at = buckets_at;
  header->slots_at = slots_at;
  std::atomic_thread_fence(std::memory_order_release);
  header->slot_bytes = slot_bytes;
  return static_cast<int64_t>(header->num_slots);
}

// How many blocks are there, up to the first that is not.
inline int64_t count_there(Header* header, const SharedBlocksCall& call) {
  const Locked locked(header, call.seconds);
  if (!locked.is_held) return LOCKED;
  if (header->slot_bytes == 0) return 0;
  const Books books(header);
  for (int64_t i = 0; i < call.blocks; i++) {
    const uint32_t found = books.find(hash_of(call, i), call.group);
    if (found == 0 || books.entries[found - 1].state.load(std::memory_order_relaxed) != THERE) return i;
  }
  return call.blocks;
}

// Gives each block a slot that is not there yet: `slots` gets it, + 1; 0 of one that is there, or being written by
// another. Returns for how many of the first there is one or the other.
inline int64_t reserve(Header* header, const SharedBlocksCall& call) {
  const Locked locked(header, call.seconds);
  if (!locked.is_held) return LOCKED;
  if (header->slot_bytes == 0) return 0;
  if (static_cast<uint64_t>(call.bytes) > header->slot_bytes) return OTHER_SIZE;
  Books books(header);
  Attachment& own = header->attachments[call.attachment];
  if (own.pid == 0) return NOT_ATTACHED;
  for (int64_t i = 0; i < call.blocks; i++) {
    const uint8_t* hash = hash_of(call, i);
    call.slots[i] = 0;
    uint32_t found = books.find(hash, call.group);
    if (found != 0 && books.entries[found - 1].state.load(std::memory_order_relaxed) == WRITING &&
        books.is_gone(books.entries[found - 1].writer)) {
      books.sweep();
      found = books.find(hash, call.group);
    }
    if (found != 0) continue;
    uint32_t* place = free_place(own.writing);
    const uint32_t slot = place == nullptr ? 0 : books.take_slot();
    if (slot == 0) return i;
    Entry& entry = books.entries[slot - 1];
    std::memcpy(entry.hash, hash, HASH_BYTES);
    std::memcpy(entry.group, call.group, GROUP_BYTES);
    entry.bytes = static_cast<uint64_t>(call.bytes);
    entry.writer = static_cast<uint32_t>(call.attachment);
    entry.pins = 0;
    *place = slot;
    entry.state.store(WRITING, std::memory_order_release);
    books.file(slot - 1);
    call.slots[i] = slot;
  }
  return call.blocks;
}

inline void mix(const Entry& entry, uint64_t* digest) {
  for (int i = 0; i < 2; i++) {
    uint64_t hash, group;
    std::memcpy(&hash, entry.hash + 8 * i, 8);
    std::memcpy(&group, entry.group + 8 * i, 8);
    digest[i] ^= hash ^ group;
  }
}

// The blocks of reserved slots are there now.
inline int64_t commit(Header* header, const SharedBlocksCall& call, int64_t blocks) {
  const Locked locked(header, PATIENCE);
  if (!locked.is_held) return LOCKED;
  Books books(header);
  Attachment& own = header->attachments[call.attachment];
  for (int64_t i = 0; i < blocks; i++) {
    if (call.slots[i] == 0) continue;
    const uint32_t slot = call.slots[i] - 1;
    Entry& entry = books.entries[slot];
    if (entry.state.load(std::memory_order_relaxed) != WRITING) continue;
    std::memcpy(entry.digest, call.digests + 2 * i, 16);
    mix(entry, entry.digest);
    entry.used_at = header->clock;
    entry.state.store(THERE, std::memory_order_release);
    let_go(own.writing, slot);
    books.make_newest(slot);
    header->num_there++;
  }
  return blocks;
}

// Pins blocks, up to the first that is not there: `slots` gets where they are, + 1. They count as used now.
inline int64_t pin(Header* header, const SharedBlocksCall& call) {
  const Locked locked(header, call.seconds);
  if (!locked.is_held) return LOCKED;
  if (header->slot_bytes == 0) return 0;
  Books books(header);
  Attachment& own = header->attachments[call.attachment];
  if (own.pid == 0) return NOT_ATTACHED;
  for (int64_t i = 0; i < call.blocks; i++) {
    const uint32_t found = books.find(hash_of(call, i), call.group);
    uint32_t* place = free_place(own.pinned);
    if (found == 0 || place == nullptr) return i;
    Entry& entry = books.entries[found - 1];
    if (entry.state.load(std::memory_order_relaxed) != THERE) return i;
    if (static_cast<uint64_t>(call.bytes) > header->slot_bytes) return OTHER_SIZE;
    *place = found;
    entry.pins++;
    books.leave_order(found - 1);
    books.make_newest(found - 1);
    call.slots[i] = found;
  }
  return call.blocks;
}

// Compares the digests of pinned blocks, and lets them go. One that is wrong is there no more. Returns how many of the
// first are right.
inline int64_t check_and_unpin(Header* header, const SharedBlocksCall& call, int64_t blocks) {
  const Locked locked(header, PATIENCE);
  if (!locked.is_held) return LOCKED;
  Books books(header);
  Attachment& own = header->attachments[call.attachment];
  int64_t right = 0;
  for (int64_t i = 0; i < blocks; i++) {
    const uint32_t slot = call.slots[i] - 1;
    const Entry& entry = books.entries[slot];
    uint64_t digest[2] = {call.digests[2 * i], call.digests[2 * i + 1]};
    mix(entry, digest);
    const bool is_right = entry.bytes == static_cast<uint64_t>(call.bytes) &&
                          std::memcmp(entry.hash, hash_of(call, i), HASH_BYTES) == 0 &&
                          std::memcmp(digest, entry.digest, 16) == 0;
    if (is_right && right == i) right++;
    if (!is_right && entry.state.load(std::memory_order_relaxed) == THERE) {
      books.remove(slot);
      header->num_damaged++;
    }
    let_go(own.pinned, slot);
    books.unpin(slot);
  }
  return right;
}

inline int64_t describe(Header* header, SharedBlocksState* state, double seconds) {
  const Locked locked(header, seconds);
  if (!locked.is_held) return LOCKED;
  int64_t unused = 0;
  if (header->slot_bytes != 0)
    for (uint32_t i = header->free; i != 0; i = entries_of(header)[i - 1].next) unused++;
  *state = {static_cast<int64_t>(header->num_slots), static_cast<int64_t>(header->slot_bytes),
            static_cast<int64_t>(header->num_used) - unused, static_cast<int64_t>(header->num_there),
            static_cast<int64_t>(header->num_evicted), static_cast<int64_t>(header->num_damaged),
            static_cast<int64_t>(header->num_repairs), static_cast<int64_t>(header->slots_at)};
  return 0;
}

// Of the group, the hashes of what is there: at most `blocks`, into `hashes`.
inline int64_t list(Header* header, const SharedBlocksCall& call) {
  const Locked locked(header, call.seconds);
  if (!locked.is_held) return LOCKED;
  const Books books(header);
  int64_t count = 0;
  for (uint32_t i = header->newest; i != 0 && count < call.blocks; i = books.entries[i - 1].older)
    if (std::memcmp(books.entries[i - 1].group, call.group, GROUP_BYTES) == 0)
      std::memcpy(static_cast<uint8_t*>(call.hashes) + HASH_BYTES * count++, books.entries[i - 1].hash, HASH_BYTES);
  return count;
}

// Copies blocks into slots, with their digests. Returns how many of the first are there, or will be when others that
// write them are done.
inline int64_t write(Header* header, SharedBlocksCall call, CopyDigest* copy) {
  const int64_t blocks = call.blocks;
  uint64_t digests[2 * TOGETHER];
  uint32_t slots[TOGETHER];
  call.slots = slots;
  call.digests = digests;
  for (int64_t done = 0; done < blocks;) {
    call.blocks = std::min(blocks - done, TOGETHER);
    const int64_t reserved = reserve(header, call);
    if (reserved < 0) return reserved;
    for (int64_t i = 0; i < reserved; i++)
      if (slots[i] != 0) copy(call.places[i], slot_of(header, slots[i] - 1), call.bytes, true, digests + 2 * i);
    const int64_t committed = commit(header, call, reserved);
    if (committed < 0) return committed;
    done += reserved;
    if (reserved < call.blocks) return done;
    call.hashes = static_cast<uint8_t*>(call.hashes) + TOGETHER * HASH_BYTES;
    call.places += TOGETHER;
  }
  return blocks;
}

// Copies blocks out of their slots. Returns how many of the first are there and right; `damaged` is set if the one
// after these was not right.
inline int64_t read(Header* header, SharedBlocksCall call, CopyDigest* copy, int64_t* damaged) {
  const int64_t blocks = call.blocks;
  uint64_t digests[2 * TOGETHER];
  uint32_t slots[TOGETHER];
  call.slots = slots;
  call.digests = digests;
  *damaged = 0;
  for (int64_t done = 0; done < blocks;) {
    call.blocks = std::min(blocks - done, TOGETHER);
    const int64_t pinned = pin(header, call);
    if (pinned < 0) return pinned;
    for (int64_t i = 0; i < pinned; i++)
      copy(slot_of(header, slots[i] - 1), call.places[i], call.bytes, false, digests + 2 * i);
    const int64_t right = check_and_unpin(header, call, pinned);
    if (right < 0) return right;
    done += right;
    *damaged = right < pinned;
    if (right < call.blocks) return done;
    call.hashes = static_cast<uint8_t*>(call.hashes) + TOGETHER * HASH_BYTES;
    call.places += TOGETHER;
  }
  return blocks;
}

}  // namespace shared_blocks
