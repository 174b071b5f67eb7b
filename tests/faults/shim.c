// Stands between a process and the C library's mutating file calls, to record them, to fail them,
// and to kill the process before or inside any of them. Preloaded (LD_PRELOAD), armed at run time:
// until shim_arm() every call goes straight through. shim.py builds it, drives it and reads its
// traces.
//
// Only calls on paths at or below one root count. One call at a time goes on below the root while
// armed, so that the order of the trace is the order in which things happened. The calls themselves
// are made as raw system calls, by their *at forms.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum Kind {
  OPEN,
  WRITE,
  TRUNCATE,
  SYNC,
  RENAME,
  LINK,
  SYMLINK,
  UNLINK,
  MKDIR,
  RMDIR,
  ALLOCATE,
  MAP,
  LOOK,
  MARK
};
enum Mode { OFF, COUNT, KILL, TORN, FAIL, FAIL_FROM, SHORT, HANG };
enum SyncFlag { FSYNC, FDATASYNC, SYNC_FILE_RANGE, SYNCFS };

// What precedes each record's path, other path and data in a trace. Little endian, no padding;
// shim.py knows it.
struct Header {
  uint32_t magic, number, kind, error;
  int64_t result, offset;
  uint64_t length, inode, other_inode;
  uint32_t flags, thread, created, path_bytes, other_bytes, reserved;
  uint64_t data_bytes;
};

struct Op {
  struct Header head;
  char path[PATH_MAX], other[PATH_MAX];  // relative to the root
  const void* data;
  int fails, dies;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
static char root[PATH_MAX];
static size_t root_bytes;
static volatile int armed;
static int mode, fault_error, trace_descriptor = -1, is_released;
static unsigned counted_kinds;
static long fault_at, count, hits;

static void renew_lock(void) { pthread_mutex_init(&lock, NULL); }

__attribute__((constructor)) static void start(void) { pthread_atfork(NULL, NULL, renew_lock); }

static void die(void) {
  for (;;) syscall(SYS_kill, getpid(), SIGKILL);
}

static void append(const void* data, size_t size) {
  for (const char* at = data; size > 0;) {
    long done = syscall(SYS_write, trace_descriptor, at, size);
    if (done <= 0) abort();
    at += done, size -= (size_t)done;
  }
}

// --- which calls count ---

// Writes the path below the root to `out`; whether it is at or below the root. `directory`: a
// descriptor or AT_FDCWD.
static int below_root(char* out, int directory, const char* path) {
  char whole[2 * PATH_MAX], clean[2 * PATH_MAX] = "";
  out[0] = 0;
  if (path == NULL) return 0;
  if (path[0] == '/') {
    if (strlen(path) >= PATH_MAX) return 0;
    strcpy(whole, path);
  } else {
    char link[64];
    if (directory == AT_FDCWD)
      strcpy(link, "/proc/self/cwd");
    else
      snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    long size = syscall(SYS_readlinkat, AT_FDCWD, link, whole, PATH_MAX);
    if (size <= 0 || whole[0] != '/' || strlen(path) >= PATH_MAX - 1) return 0;
    whole[size] = '/';
    strcpy(whole + size + 1, path);
  }
  size_t used = 0;
  for (char *save = NULL, *part = strtok_r(whole, "/", &save); part != NULL;
       part = strtok_r(NULL, "/", &save)) {
    if (strcmp(part, ".") == 0) continue;
    if (strcmp(part, "..") == 0) {
      while (used > 0 && clean[--used] != '/') {
      }
    } else {
      clean[used++] = '/';
      strcpy(clean + used, part);
      used += strlen(part);
    }
    clean[used] = 0;
  }
  if (strncmp(clean, root, root_bytes) != 0 || (clean[root_bytes] != '/' && clean[root_bytes] != 0))
    return 0;
  strncpy(out, clean[root_bytes] == 0 ? "." : clean + root_bytes + 1, PATH_MAX - 1);
  return 1;
}

static uint64_t inode_of(int directory, const char* path, int flags) {
  struct stat about;
  return fstatat(directory, path, &about, flags) == 0 ? about.st_ino : 0;
}

static int concerns(struct Op* op, enum Kind kind, int directory, const char* path) {
  if (!armed) return 0;
  int before = errno, found;
  memset(&op->head, 0, sizeof op->head);
  op->data = NULL, op->fails = op->dies = 0, op->other[0] = 0;
  op->head.kind = kind;
  if ((found = below_root(op->path, directory, path)))
    op->head.inode = inode_of(directory, path, AT_SYMLINK_NOFOLLOW);
  errno = before;
  return found;
}

static int concerns_descriptor(struct Op* op, enum Kind kind, int descriptor) {
  if (!armed) return 0;
  int before = errno;
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  long size = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
  int found = 0;
  if (size > 0 && path[0] == '/') {
    path[size] = 0;
    found = concerns(op, kind, AT_FDCWD, path);
    if (found) op->head.inode = inode_of(descriptor, "", AT_EMPTY_PATH);
  }
  errno = before;
  return found;
}

// --- what happens to them ---

// Takes the lock, numbers the call, and decides its fate; how many of its `size` bytes it is to
// carry out.
static size_t begin(struct Op* op, size_t size) {
  pthread_mutex_lock(&lock);
  op->head.length = size;
  int counts = armed && (counted_kinds >> op->head.kind & 1);
  op->head.number = counts ? (uint32_t)count++ : UINT32_MAX;
  if (!counts || mode == COUNT ||
      (op->head.number != fault_at && !(mode == FAIL_FROM && op->head.number > fault_at)))
    return size;
  hits++;
  switch (mode) {
    case KILL:
      die();
    case FAIL:
    case FAIL_FROM:
      op->fails = 1;
      return size;
    case TORN:
      op->dies = 1;
      return op->head.kind == WRITE ? size / 2 : size;
    case SHORT:
      return size > 1 ? size / 2 : size;
    case HANG:
      while (!is_released)
        pthread_cond_wait(&released, &lock);  // lets go of the lock: the others go on
  }
  return size;
}

// Records the call and lets the next one begin; passes the result on.
static long finish(struct Op* op, long result) {
  int error = op->fails ? fault_error : errno;
  if (trace_descriptor >= 0 && (op->head.number != UINT32_MAX || op->head.kind == MARK)) {
    op->head.magic = 0x50416C44;
    op->head.error = result < 0 ? (uint32_t)error : 0;
    op->head.result = result;
    op->head.thread = (uint32_t)syscall(SYS_gettid);
    op->head.path_bytes = (uint32_t)strlen(op->path),
    op->head.other_bytes = (uint32_t)strlen(op->other);
    op->head.data_bytes = op->head.kind == WRITE && result > 0 ? (uint64_t)result : 0;
    append(&op->head, sizeof op->head);
    append(op->path, op->head.path_bytes);
    append(op->other, op->head.other_bytes);
    append(op->data, op->head.data_bytes);
  }
  if (op->dies) die();
  pthread_mutex_unlock(&lock);
  errno = error;
  return result;
}

// A call without bytes.
#define CARRY_OUT(op, call) (begin(op, 0), finish(op, (op)->fails ? -1 : (call)))

// --- driven by the tests ---

// `kinds`: bit set of the kinds that are numbered, recorded and subject to the fault.
void shim_arm(const char* directory, int how, long at, int error, unsigned kinds) {
  pthread_mutex_lock(&lock);
  strncpy(root, directory, PATH_MAX - 1);
  root_bytes = strlen(root);
  mode = how, fault_at = at, fault_error = error, counted_kinds = kinds;
  count = hits = is_released = 0;
  armed = how != OFF;
  pthread_mutex_unlock(&lock);
}

// How many calls have been counted since shim_arm, and how many of them the fault has hit.
long shim_count(void) { return count; }
long shim_hits(void) { return hits; }

// The fault is over: what hangs goes on, nothing fails any more. Counting and the trace go on.
void shim_release(void) {
  pthread_mutex_lock(&lock);
  mode = COUNT, is_released = 1;
  pthread_cond_broadcast(&released);
  pthread_mutex_unlock(&lock);
}

// Begin to append records to a new file, NULL: stop. Returns 0, or an error number.
int shim_trace(const char* file) {
  pthread_mutex_lock(&lock);
  if (trace_descriptor >= 0) syscall(SYS_close, trace_descriptor);
  trace_descriptor = -1;
  int error = 0;
  if (file != NULL) {
    trace_descriptor = (int)syscall(SYS_openat, AT_FDCWD, file,
                                    O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0666);
    error = trace_descriptor < 0 ? errno : 0;
  }
  pthread_mutex_unlock(&lock);
  return error;
}

// A record of the test's own, such as an acknowledgement; it has no number.
void shim_mark(const char* text) {
  static struct Op op;
  pthread_mutex_lock(&lock);
  memset(&op, 0, sizeof op);
  op.head.kind = MARK, op.head.number = UINT32_MAX;
  strncpy(op.path, text, PATH_MAX - 1);
  finish(&op, 0);
}

// --- the calls ---

static int opened(int directory, const char* path, int flags, mode_t permissions) {
  struct Op op;
  enum Kind kind = flags & (O_CREAT | O_TRUNC) || (flags & O_TMPFILE) == O_TMPFILE ? OPEN : LOOK;
  if (!concerns(&op, kind, directory, path))
    return (int)syscall(SYS_openat, directory, path, flags, permissions);
  begin(&op, 0);
  op.head.flags = (uint32_t)flags;
  op.head.inode = inode_of(directory, path, AT_SYMLINK_NOFOLLOW);
  int descriptor = op.fails ? -1 : (int)syscall(SYS_openat, directory, path, flags, permissions);
  if (descriptor >= 0) {
    op.head.created = op.head.inode == 0 || (flags & O_TMPFILE) == O_TMPFILE;
    op.head.inode = inode_of(descriptor, "", AT_EMPTY_PATH);
  }
  return (int)finish(&op, descriptor);
}

static mode_t permissions_of(int flags, va_list more) {
  return flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? (mode_t)va_arg(more, int) : 0;
}

int open(const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  mode_t permissions = permissions_of(flags, more);
  va_end(more);
  return opened(AT_FDCWD, path, flags, permissions);
}

int openat(int directory, const char* path, int flags, ...) {
  va_list more;
  va_start(more, flags);
  mode_t permissions = permissions_of(flags, more);
  va_end(more);
  return opened(directory, path, flags, permissions);
}

int creat(const char* path, mode_t permissions) {
  return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, permissions);
}
int __open_2(const char* path, int flags) { return opened(AT_FDCWD, path, flags, 0); }
int __openat_2(int directory, const char* path, int flags) {
  return opened(directory, path, flags, 0);
}

FILE* fopen(const char* path, const char* how) {
  static FILE* (*original)(const char*, const char*);
  if (original == NULL) original = (FILE * (*)(const char*, const char*)) dlsym(RTLD_NEXT, "fopen");
  struct Op op;
  enum Kind kind = how[0] == 'r' ? LOOK : OPEN;
  if (!concerns(&op, kind, AT_FDCWD, path)) return original(path, how);
  begin(&op, 0);
  op.head.flags = how[0] == 'w' ? O_CREAT | O_TRUNC : how[0] == 'a' ? O_CREAT | O_APPEND : 0;
  op.head.inode = inode_of(AT_FDCWD, path, 0);
  FILE* file =
      op.fails
          ? NULL
          : original(path, how);  // the C library's own open is not seen, hence not counted twice
  op.head.created = file != NULL && op.head.inode == 0;
  if (file != NULL) op.head.inode = inode_of(fileno(file), "", AT_EMPTY_PATH);
  finish(&op, file == NULL ? -1 : fileno(file));
  return file;
}

// The offset at which a plain write on this descriptor begins.
static int64_t position(int descriptor) {
  struct stat about;
  if (syscall(SYS_fcntl, descriptor, F_GETFL) & O_APPEND && fstat(descriptor, &about) == 0)
    return about.st_size;
  return syscall(SYS_lseek, descriptor, 0, SEEK_CUR);
}

static ssize_t write_at(int descriptor, const void* data, size_t size, int64_t offset) {
  return offset < 0 ? syscall(SYS_write, descriptor, data, size)
                    : syscall(SYS_pwrite64, descriptor, data, size, offset);
}

// `offset` below 0: where the descriptor stands.
static ssize_t written(int descriptor, const void* data, size_t size, int64_t offset) {
  struct Op op;
  if (!concerns_descriptor(&op, WRITE, descriptor)) return write_at(descriptor, data, size, offset);
  size_t some = begin(&op, size);
  op.head.offset = offset < 0 ? position(descriptor) : offset;
  op.data = data;
  return finish(&op, op.fails ? -1 : write_at(descriptor, data, some, offset));
}

static ssize_t gathered(int descriptor, const struct iovec* pieces, int number, int64_t offset) {
  size_t size = 0, at = 0;
  for (int i = 0; i < number; i++) size += pieces[i].iov_len;
  char* whole = malloc(size + 1);
  if (whole == NULL) return errno = ENOMEM, -1;
  for (int i = 0; i < number; at += pieces[i++].iov_len)
    memcpy(whole + at, pieces[i].iov_base, pieces[i].iov_len);
  ssize_t result = written(descriptor, whole, size, offset);
  int error = errno;
  free(whole);
  errno = error;
  return result;
}

ssize_t write(int descriptor, const void* data, size_t size) {
  return written(descriptor, data, size, -1);
}
ssize_t pwrite(int descriptor, const void* data, size_t size, off_t offset) {
  return offset < 0 ? (errno = EINVAL, -1) : written(descriptor, data, size, offset);
}
ssize_t writev(int descriptor, const struct iovec* pieces, int number) {
  return armed ? gathered(descriptor, pieces, number, -1)
               : syscall(SYS_writev, descriptor, pieces, number);
}
ssize_t pwritev(int descriptor, const struct iovec* pieces, int number, off_t offset) {
  return gathered(descriptor, pieces, number, offset);
}
ssize_t pwritev2(int descriptor, const struct iovec* pieces, int number, off_t offset, int flags) {
  (void)flags;
  return gathered(descriptor, pieces, number, offset);
}

// One piece of a copy, as a read and a write: its data is then seen like any other. `source_at`,
// `target_at`: NULL, where the descriptors stand.
static ssize_t copied(int source, off_t* source_at, int target, off_t* target_at, size_t size) {
  size_t most = size < (1 << 20) ? size : 1 << 20;
  char* data = malloc(most + 1);
  if (data == NULL) return errno = ENOMEM, -1;
  off_t from = source_at != NULL ? *source_at : (off_t)syscall(SYS_lseek, source, 0, SEEK_CUR);
  ssize_t done = syscall(SYS_pread64, source, data, most, from);
  if (done > 0) done = written(target, data, (size_t)done, target_at != NULL ? *target_at : -1);
  int error = errno;
  free(data);
  if (done > 0) {
    if (source_at != NULL)
      *source_at += done;
    else
      syscall(SYS_lseek, source, from + done, SEEK_SET);
    if (target_at != NULL) *target_at += done;
  }
  errno = error;
  return done;
}

ssize_t sendfile(int target, int source, off_t* at, size_t size) {
  struct Op op;
  if (!concerns_descriptor(&op, WRITE, target))
    return syscall(SYS_sendfile, target, source, at, size);
  return copied(source, at, target, NULL, size);
}
ssize_t copy_file_range(int source, off_t* source_at, int target, off_t* target_at, size_t size,
                        unsigned flags) {
  struct Op op;
  if (!concerns_descriptor(&op, WRITE, target)) {
    return syscall(SYS_copy_file_range, source, source_at, target, target_at, size, flags);
  }
  return copied(source, source_at, target, target_at, size);
}

int ftruncate(int descriptor, off_t length) {
  struct Op op;
  if (!concerns_descriptor(&op, TRUNCATE, descriptor))
    return (int)syscall(SYS_ftruncate, descriptor, length);
  op.head.offset = length;
  return (int)CARRY_OUT(&op, syscall(SYS_ftruncate, descriptor, length));
}

int truncate(const char* path, off_t length) {
  struct Op op;
  if (!concerns(&op, TRUNCATE, AT_FDCWD, path)) return (int)syscall(SYS_truncate, path, length);
  op.head.offset = length;
  return (int)CARRY_OUT(&op, syscall(SYS_truncate, path, length));
}

int fallocate(int descriptor, int how, off_t offset, off_t length) {
  struct Op op;
  if (!concerns_descriptor(&op, ALLOCATE, descriptor))
    return (int)syscall(SYS_fallocate, descriptor, how, offset, length);
  op.head.offset = offset, op.head.flags = (uint32_t)how;
  begin(&op, (size_t)length);
  return (int)finish(&op, op.fails ? -1 : syscall(SYS_fallocate, descriptor, how, offset, length));
}

int posix_fallocate(int descriptor, off_t offset, off_t length) {
  int before = errno, result = fallocate(descriptor, 0, offset, length) == 0 ? 0 : errno;
  errno = before;
  return result;
}

static int synced(int descriptor, enum SyncFlag flag, long number) {
  struct Op op;
  if (!concerns_descriptor(&op, SYNC, descriptor)) return (int)syscall(number, descriptor);
  op.head.flags = flag;
  return (int)CARRY_OUT(&op, syscall(number, descriptor));
}

int fsync(int descriptor) { return synced(descriptor, FSYNC, SYS_fsync); }
int fdatasync(int descriptor) { return synced(descriptor, FDATASYNC, SYS_fdatasync); }
int syncfs(int descriptor) { return synced(descriptor, SYNCFS, SYS_syncfs); }

int sync_file_range(int descriptor, off_t offset, off_t length, unsigned flags) {
  struct Op op;
  if (!concerns_descriptor(&op, SYNC, descriptor))
    return (int)syscall(SYS_sync_file_range, descriptor, offset, length, flags);
  op.head.flags = SYNC_FILE_RANGE, op.head.offset = offset;
  return (int)CARRY_OUT(&op, syscall(SYS_sync_file_range, descriptor, offset, length, flags));
}

// Both names count, whichever of them lies below the root.
static int concerns_two(struct Op* op, enum Kind kind, int from, const char* source, int to,
                        const char* target) {
  int first = concerns(op, kind, from, source);
  if (!armed) return 0;
  int before = errno, second = below_root(op->other, to, target);
  if (second) op->head.other_inode = inode_of(to, target, AT_SYMLINK_NOFOLLOW);
  errno = before;
  return first || second;
}

int renameat2(int from, const char* source, int to, const char* target, unsigned flags) {
  struct Op op;
  if (!concerns_two(&op, RENAME, from, source, to, target))
    return (int)syscall(SYS_renameat2, from, source, to, target, flags);
  op.head.flags = flags;
  return (int)CARRY_OUT(&op, syscall(SYS_renameat2, from, source, to, target, flags));
}
int rename(const char* source, const char* target) {
  return renameat2(AT_FDCWD, source, AT_FDCWD, target, 0);
}
int renameat(int from, const char* source, int to, const char* target) {
  return renameat2(from, source, to, target, 0);
}

int linkat(int from, const char* source, int to, const char* target, int flags) {
  struct Op op;
  if (!concerns_two(&op, LINK, from, source, to, target))
    return (int)syscall(SYS_linkat, from, source, to, target, flags);
  op.head.inode = inode_of(
      from, source, flags & AT_SYMLINK_FOLLOW ? 0 : AT_SYMLINK_NOFOLLOW | (flags & AT_EMPTY_PATH));
  op.head.flags = (uint32_t)flags;
  return (int)CARRY_OUT(&op, syscall(SYS_linkat, from, source, to, target, flags));
}
int link(const char* source, const char* target) {
  return linkat(AT_FDCWD, source, AT_FDCWD, target, 0);
}

int symlinkat(const char* source, int to, const char* target) {
  struct Op op;
  if (!concerns(&op, SYMLINK, to, target)) return (int)syscall(SYS_symlinkat, source, to, target);
  strncpy(op.other, source, PATH_MAX - 1);
  return (int)CARRY_OUT(&op, syscall(SYS_symlinkat, source, to, target));
}
int symlink(const char* source, const char* target) { return symlinkat(source, AT_FDCWD, target); }

int unlinkat(int directory, const char* path, int flags) {
  struct Op op;
  enum Kind kind = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
  if (!concerns(&op, kind, directory, path))
    return (int)syscall(SYS_unlinkat, directory, path, flags);
  return (int)CARRY_OUT(&op, syscall(SYS_unlinkat, directory, path, flags));
}
int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char* path) {
  struct stat about;
  return lstat(path, &about) == 0 && S_ISDIR(about.st_mode) ? rmdir(path) : unlink(path);
}

int mkdirat(int directory, const char* path, mode_t permissions) {
  struct Op op;
  if (!concerns(&op, MKDIR, directory, path))
    return (int)syscall(SYS_mkdirat, directory, path, permissions);
  begin(&op, 0);
  int result = op.fails ? -1 : (int)syscall(SYS_mkdirat, directory, path, permissions);
  if (result == 0) op.head.inode = inode_of(directory, path, AT_SYMLINK_NOFOLLOW);
  return (int)finish(&op, result);
}
int mkdir(const char* path, mode_t permissions) { return mkdirat(AT_FDCWD, path, permissions); }

void* mmap(void* address, size_t length, int protection, int flags, int descriptor, off_t offset) {
  struct Op op;
  int writes = (flags & MAP_SHARED) && (protection & PROT_WRITE) && !(flags & MAP_ANONYMOUS) &&
               descriptor >= 0;
  if (!writes || !concerns_descriptor(&op, MAP, descriptor)) {
    return (void*)syscall(SYS_mmap, address, length, protection, flags, descriptor, offset);
  }
  begin(&op, length);
  op.head.offset = offset;
  return (void*)finish(
      &op,
      op.fails ? -1 : syscall(SYS_mmap, address, length, protection, flags, descriptor, offset));
}

#define SAME_AS(name) __attribute__((alias(name)))
int open64(const char* path, int flags, ...) SAME_AS("open");
int openat64(int directory, const char* path, int flags, ...) SAME_AS("openat");
int creat64(const char* path, mode_t permissions) SAME_AS("creat");
int __open64_2(const char* path, int flags) SAME_AS("__open_2");
int __openat64_2(int directory, const char* path, int flags) SAME_AS("__openat_2");
FILE* fopen64(const char* path, const char* how) SAME_AS("fopen");
ssize_t pwrite64(int descriptor, const void* data, size_t size, off64_t offset) SAME_AS("pwrite");
ssize_t pwritev64(int descriptor, const struct iovec* pieces, int number, off64_t offset)
    SAME_AS("pwritev");
ssize_t pwritev64v2(int descriptor, const struct iovec* pieces, int number, off64_t offset,
                    int flags) SAME_AS("pwritev2");
ssize_t sendfile64(int target, int source, off64_t* at, size_t size) SAME_AS("sendfile");
int ftruncate64(int descriptor, off64_t length) SAME_AS("ftruncate");
int truncate64(const char* path, off64_t length) SAME_AS("truncate");
int fallocate64(int descriptor, int how, off64_t offset, off64_t length) SAME_AS("fallocate");
int posix_fallocate64(int descriptor, off64_t offset, off64_t length) SAME_AS("posix_fallocate");
void* mmap64(void* address, size_t length, int protection, int flags, int descriptor,
             off64_t offset) SAME_AS("mmap");
