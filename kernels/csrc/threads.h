// The threads that share a kernel's work: its caller and some helpers, which take ranges of it until none is left.
//
//     caller    opens ──► takes ranges ───────────────► none left, closes ──► waits for those inside ──► returns
//     helper 1        enters ──► takes ranges ──► leaves ·············spins, then sleeps·············
//     helper 2   (the system gives its core to another program: it does not enter, and nobody waits for it)
//
// That is the difference from a barrier, where all threads have to come before anybody goes on: on cores that are
// shared with a server and its clients, a kernel of microseconds would wait milliseconds for a thread's turn.
//
// Why nobody works on a call that has returned: a helper enters by counting itself in and only then looks whether the
// call is open; the caller closes it and only then looks whether anybody is inside. Both in one total order, so one
// of the two sees the other.
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>

class ThreadPool {
 public:
  int64_t threads() const { return threads_.load(std::memory_order_relaxed); }

  // Helpers that there are too many of sleep until there are more again, and are not woken by calls.
  void set_threads(int64_t threads) {
    threads_.store(std::max<int64_t>(threads, 1));
    resized_.fetch_add(1);
    futex(resized_, FUTEX_WAKE_PRIVATE, INT32_MAX);
  }

  // Calls body(first, end) for ranges that make up [0, items), none longer than `longest`. Ranges are long at first and
  // shorter towards the end, so that all threads end at about the same time and yet each reads memory in long runs.
  template <typename Body>
  void run(int64_t items, int64_t longest, const Body& body) {
    Call call{items, longest, threads(), &body, [](const void* context, int64_t first, int64_t end) {
                (*static_cast<const Body*>(context))(first, end);
              }};
    // Two threads of a program that compute at the same time do not share the helpers: the second does without.
    if (call.threads == 1 || items < 2 || is_taken_.exchange(true, std::memory_order_acquire)) {
      body(0, items);
      return;
    }
    start_helpers(call.threads - 1);
    call_ = call;
    next_.store(0, std::memory_order_relaxed);
    is_open_.store(true);
    opened_.fetch_add(1);
    if (sleeping_.load() > 0) futex(opened_, FUTEX_WAKE_PRIVATE, INT32_MAX);
    take_ranges(call);
    is_open_.store(false);
    wait_for_those_inside();
    is_taken_.store(false, std::memory_order_release);
  }

  // A forked child has none of the helpers, wherever they were.
  void forget_helpers() {
    helpers_ = 0;
    inside_ = sleeping_ = 0;
    is_taken_ = is_open_ = false;
  }

 private:
  struct Call {
    int64_t items, longest, threads;
    const void* context;
    void (*body)(const void* context, int64_t first, int64_t end);
  };

  // How long a helper looks for work before it sleeps: longer than what is between two kernels of a step, shorter than
  // what anybody else on its core would notice.
  static constexpr int64_t SPIN_NANOSECONDS = 50'000;
  static constexpr int PAUSES_PER_LOOK = 16;  // at the clock

  static int64_t now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000 + time.tv_nsec;
  }

  static void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
    syscall(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
  }

  void take_ranges(const Call& call) {
    int64_t first = next_.load(std::memory_order_relaxed);
    while (first < call.items) {
      const int64_t share = (call.items - first) / (2 * call.threads);
      const int64_t end = first + std::clamp<int64_t>(share, 1, call.longest);
      if (!next_.compare_exchange_weak(first, end, std::memory_order_relaxed)) continue;
      call.body(call.context, first, end);
      first = next_.load(std::memory_order_relaxed);
    }
  }

  // A helper inside may have lost its core, perhaps to this very thread.
  void wait_for_those_inside() {
    for (int pauses = 0; inside_.load() > 0; pauses++) {
      if (pauses < 1000)
        __builtin_ia32_pause();
      else
        std::this_thread::yield();
    }
  }

  // As many as the system allows: with fewer of them every call is computed, too.
  void start_helpers(int64_t wanted) {
    if (helpers_ >= wanted) return;
    sigset_t others, before;  // signals are for the program's own threads, but for those that a thread raises itself
    sigfillset(&others);
    for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&others, own);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    try {
      for (; helpers_ < wanted; helpers_++) std::thread([this, number = helpers_] { help(number); }).detach();
    } catch (const std::system_error&) {
      threads_.store(helpers_ + 1);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void help(int64_t number) {
    pthread_setname_np(pthread_self(), "quire-kernels");
    for (uint32_t seen = 0;;) {
      wait_until_wanted(number);
      seen = wait_for_another(seen);
      inside_.fetch_add(1);
      if (is_open_.load() && number + 1 < call_.threads) take_ranges(call_);
      inside_.fetch_sub(1);
    }
  }

  void wait_until_wanted(int64_t number) {
    for (uint32_t resized = resized_.load(); number + 1 >= threads_.load(); resized = resized_.load())
      futex(resized_, FUTEX_WAIT_PRIVATE, resized);
  }

  // Until a call is opened that is not the one seen last.
  uint32_t wait_for_another(uint32_t seen) {
    for (;;) {
      const int64_t deadline = now() + SPIN_NANOSECONDS;
      do {
        for (int i = 0; i < PAUSES_PER_LOOK; i++) {
          const uint32_t opened = opened_.load(std::memory_order_acquire);
          if (opened != seen) return opened;
          __builtin_ia32_pause();
        }
      } while (now() < deadline);
      sleeping_.fetch_add(1);
      futex(opened_, FUTEX_WAIT_PRIVATE, seen);  // returns at once if a call has been opened since
      sleeping_.fetch_sub(1);
    }
  }

  std::atomic<int64_t> threads_{1};
  std::atomic<uint32_t> resized_{0};
  std::atomic<bool> is_taken_{false};
  int64_t helpers_ = 0;  // this and call_ belong to who has taken the pool
  Call call_{};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> opened_{0};
  std::atomic<bool> is_open_{false};
  alignas(64) std::atomic<int64_t> inside_{0};
  std::atomic<int64_t> sleeping_{0};
};

// Never destroyed: helpers look at it until the process ends.
inline ThreadPool& pool() {
  static ThreadPool* const instance = [] {
    pthread_atfork(nullptr, nullptr, [] { pool().forget_helpers(); });
    return new ThreadPool;
  }();
  return *instance;
}

// body(i) for all rows, by several threads where that `is_worth_it`.
template <typename Body>
void for_each_row(int64_t rows, bool is_worth_it, const Body& body) {
  const auto range = [&body](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++) body(row);
  };
  if (is_worth_it)
    pool().run(rows, rows, range);
  else
    range(0, rows);
}
