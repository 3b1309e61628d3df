/* Makes the Nth system call on a path below one folder fail. Preloaded into a test program and the programs that
 * it starts (Linux, glibc); `mod.rs` compiles it and controls it.
 *
 * OVERDRIVE_FAULTS names a file that is mapped and shared with the test: which call fails, and how many there were.
 * OVERDRIVE_FAULTS_FOLDER is the folder. The standard library and memmap2 call these functions. tempfile renames by a
 * system call of its own, which is trapped (x86-64). */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/ucontext.h>
#include <sys/uio.h>
#include <unistd.h>

/* The words of the control file, as `mod.rs` writes them. */
struct control {
    uint64_t at;    /* the number of the call that fails, from 1 on; 0: none is counted */
    uint64_t mode;
    uint64_t count; /* the calls so far */
    uint64_t fired; /* the calls that failed */
    char call[32];  /* the name of the first one */
};

enum {
    FAIL_ONCE = 1, /* this call fails with EIO */
    FULL_DISK = 2, /* from this call on nothing fits: half of it is written, then ENOSPC */
    SHORT_ONCE = 3, /* this call reads or writes half of what it could */
    KILLED = 4,    /* the process is killed instead of this call */
};

/* What a call does: takes room on the disk; moves bytes. */
enum { OTHER = 0, ROOM = 1, BYTES = 2 };
enum { PASS, FAIL, HALF };

static struct control *control;
static const char *folder;
static size_t folder_length;

#define REAL(name)                                     \
    ({                                                 \
        static __typeof__(&name) real;                 \
        if (!real)                                     \
            real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
        real;                                          \
    })

static void trap_renameat(void);

__attribute__((constructor)) static void attach(void) {
    const char *file = getenv("OVERDRIVE_FAULTS");
    const char *below = getenv("OVERDRIVE_FAULTS_FOLDER");
    if (!file || !below)
        return;
    int fd = REAL(open64)(file, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return;
    void *map = REAL(mmap64)(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REAL(close)(fd);
    if (map == MAP_FAILED)
        return;
    folder = strdup(below);
    folder_length = strlen(below);
    control = map;
    trap_renameat();
}

static int armed(void) { return control && __atomic_load_n(&control->at, __ATOMIC_SEQ_CST) != 0; }

static int below(const char *path) { return path && strncmp(path, folder, folder_length) == 0; }

static int is_below(int fd) {
    char link[32], path[PATH_MAX];
    if (!control || fd < 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return below(path);
}

static int fd_below(int fd) { return armed() && is_below(fd); }

static int path_below(int dirfd, const char *path) {
    if (!armed() || !path)
        return 0;
    return path[0] == '/' ? below(path) : dirfd != AT_FDCWD && fd_below(dirfd);
}

/* Counts a call and says what becomes of it. */
static int fault(const char *call, int kind) {
    uint64_t mode = control->mode;
    if ((mode == FULL_DISK && !(kind & ROOM)) || (mode == SHORT_ONCE && !(kind & BYTES)))
        return PASS;
    uint64_t at = control->at;
    uint64_t count = __atomic_add_fetch(&control->count, 1, __ATOMIC_SEQ_CST);
    if (count < at || (count > at && mode != FULL_DISK))
        return PASS;
    if (__atomic_fetch_add(&control->fired, 1, __ATOMIC_SEQ_CST) == 0)
        strncpy(control->call, call, sizeof control->call - 1);
    if (mode == KILLED)
        kill(getpid(), SIGKILL);
    if (mode == SHORT_ONCE || (mode == FULL_DISK && count == at && (kind & BYTES)))
        return HALF;
    errno = mode == FULL_DISK ? ENOSPC : EIO;
    return FAIL;
}

/* Half of a transfer. One byte cannot be halved: a full disk does not take it, and else it passes whole. */
static int halved(size_t *length) {
    if (*length > 1) {
        *length /= 2;
        return 1;
    }
    return control->mode != FULL_DISK;
}

#define ON_PATH(name, dirfd, path, kind, failed)                       \
    if (path_below(dirfd, path) && fault(name, kind) == FAIL)          \
        return failed;
#define ON_FD(name, fd, kind, failed)                                  \
    if (fd_below(fd) && fault(name, kind) == FAIL)                     \
        return failed;
#define TRANSFER(name, fd, kind, length)                               \
    if (fd_below(fd)) {                                                \
        int what = fault(name, kind);                                  \
        if (what == HALF && !halved(&length)) {                        \
            errno = ENOSPC;                                            \
            what = FAIL;                                               \
        }                                                              \
        if (what == FAIL)                                              \
            return -1;                                                 \
    }

/* --- Opening. */
static int makes_file(int flags) {
    /* O_TMPFILE includes O_DIRECTORY, which makes nothing. */
    return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE ? ROOM : OTHER;
}

#define OPEN(name)                                                     \
    int name(const char *path, int flags, ...) {                       \
        va_list rest;                                                  \
        va_start(rest, flags);                                         \
        mode_t mode = makes_file(flags) ? va_arg(rest, mode_t) : 0;    \
        va_end(rest);                                                  \
        ON_PATH("open", AT_FDCWD, path, makes_file(flags), -1)         \
        return REAL(name)(path, flags, mode);                          \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                   \
    int name(int dirfd, const char *path, int flags, ...) {            \
        va_list rest;                                                  \
        va_start(rest, flags);                                         \
        mode_t mode = makes_file(flags) ? va_arg(rest, mode_t) : 0;    \
        va_end(rest);                                                  \
        ON_PATH("openat", dirfd, path, makes_file(flags), -1)          \
        return REAL(name)(dirfd, path, flags, mode);                   \
    }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                    \
    FILE *name(const char *path, const char *mode) {                   \
        ON_PATH("fopen", AT_FDCWD, path, mode[0] == 'r' ? OTHER : ROOM, NULL) \
        return REAL(name)(path, mode);                                 \
    }
FOPEN(fopen)
FOPEN(fopen64)

/* The descriptor is closed also when close reports an error. */
int close(int fd) {
    int fails = fd_below(fd) && fault("close", OTHER) == FAIL;
    int reason = errno;
    int result = REAL(close)(fd);
    if (!fails)
        return result;
    errno = reason;
    return -1;
}

/* --- Reading and writing. */
ssize_t read(int fd, void *buffer, size_t length) {
    TRANSFER("read", fd, BYTES, length)
    return REAL(read)(fd, buffer, length);
}
ssize_t pread64(int fd, void *buffer, size_t length, off64_t offset) {
    TRANSFER("pread", fd, BYTES, length)
    return REAL(pread64)(fd, buffer, length, offset);
}
ssize_t write(int fd, const void *buffer, size_t length) {
    TRANSFER("write", fd, ROOM | BYTES, length)
    return REAL(write)(fd, buffer, length);
}
ssize_t pwrite64(int fd, const void *buffer, size_t length, off64_t offset) {
    TRANSFER("pwrite", fd, ROOM | BYTES, length)
    return REAL(pwrite64)(fd, buffer, length, offset);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    ON_FD("writev", fd, ROOM, -1)
    return REAL(writev)(fd, parts, count);
}
size_t fwrite(const void *buffer, size_t size, size_t count, FILE *file) {
    if (fd_below(fileno(file))) {
        int what = fault("fwrite", ROOM | BYTES);
        if (what == FAIL)
            return 0;
        /* Fewer than all is an error of fwrite, never a success. */
        if (what == HALF && control->mode == FULL_DISK) {
            count = REAL(fwrite)(buffer, size, count / 2, file);
            errno = ENOSPC;
            return count;
        }
    }
    return REAL(fwrite)(buffer, size, count, file);
}
int fclose(FILE *file) {
    int fails = fd_below(fileno(file)) && fault("fclose", ROOM) == FAIL;
    int reason = errno;
    int result = REAL(fclose)(file);
    if (!fails)
        return result;
    errno = reason;
    return EOF;
}
int fflush(FILE *file) {
    if (file && fd_below(fileno(file)) && fault("fflush", ROOM) == FAIL)
        return EOF;
    return REAL(fflush)(file);
}
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t length, unsigned flags) {
    TRANSFER("copy_file_range", out, ROOM | BYTES, length)
    return REAL(copy_file_range)(in, from, out, to, length, flags);
}
ssize_t sendfile64(int out, int in, off64_t *offset, size_t length) {
    TRANSFER("sendfile", out, ROOM | BYTES, length)
    return REAL(sendfile64)(out, in, offset, length);
}
off64_t lseek64(int fd, off64_t offset, int whence) {
    ON_FD("lseek", fd, OTHER, -1)
    return REAL(lseek64)(fd, offset, whence);
}
off_t lseek(int fd, off_t offset, int whence) {
    ON_FD("lseek", fd, OTHER, -1)
    return REAL(lseek)(fd, offset, whence);
}
void *mmap64(void *address, size_t length, int protection, int flags, int fd, off64_t offset) {
    ON_FD("mmap", fd, OTHER, MAP_FAILED)
    return REAL(mmap64)(address, length, protection, flags, fd, offset);
}
void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset) {
    ON_FD("mmap", fd, OTHER, MAP_FAILED)
    return REAL(mmap)(address, length, protection, flags, fd, offset);
}

/* --- Durability. The disk is not waited for: no power fails in a test. */
int fsync(int fd) {
    ON_FD("fsync", fd, ROOM, -1)
    return is_below(fd) ? 0 : REAL(fsync)(fd);
}
int fdatasync(int fd) {
    ON_FD("fdatasync", fd, ROOM, -1)
    return is_below(fd) ? 0 : REAL(fdatasync)(fd);
}
int ftruncate64(int fd, off64_t length) {
    ON_FD("ftruncate", fd, ROOM, -1)
    return REAL(ftruncate64)(fd, length);
}
int fallocate64(int fd, int mode, off64_t offset, off64_t length) {
    ON_FD("fallocate", fd, ROOM, -1)
    return REAL(fallocate64)(fd, mode, offset, length);
}
int posix_fallocate64(int fd, off64_t offset, off64_t length) {
    ON_FD("posix_fallocate", fd, ROOM, errno)
    return REAL(posix_fallocate64)(fd, offset, length);
}

/* --- Names. */
int rename(const char *from, const char *to) {
    ON_PATH("rename", AT_FDCWD, to, OTHER, -1)
    return REAL(rename)(from, to);
}
int renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags) {
    ON_PATH("renameat2", to_fd, to, OTHER, -1)
    return REAL(renameat2)(from_fd, from, to_fd, to, flags);
}
int link(const char *from, const char *to) {
    ON_PATH("link", AT_FDCWD, to, ROOM, -1)
    return REAL(link)(from, to);
}
int linkat(int from_fd, const char *from, int to_fd, const char *to, int flags) {
    ON_PATH("linkat", to_fd, to, ROOM, -1)
    return REAL(linkat)(from_fd, from, to_fd, to, flags);
}
int unlink(const char *path) {
    ON_PATH("unlink", AT_FDCWD, path, OTHER, -1)
    return REAL(unlink)(path);
}
int unlinkat(int dirfd, const char *path, int flags) {
    ON_PATH("unlinkat", dirfd, path, OTHER, -1)
    return REAL(unlinkat)(dirfd, path, flags);
}
int rmdir(const char *path) {
    ON_PATH("rmdir", AT_FDCWD, path, OTHER, -1)
    return REAL(rmdir)(path);
}
int mkdir(const char *path, mode_t mode) {
    ON_PATH("mkdir", AT_FDCWD, path, ROOM, -1)
    return REAL(mkdir)(path, mode);
}
int chmod(const char *path, mode_t mode) {
    ON_PATH("chmod", AT_FDCWD, path, OTHER, -1)
    return REAL(chmod)(path, mode);
}
int fchmod(int fd, mode_t mode) {
    ON_FD("fchmod", fd, OTHER, -1)
    return REAL(fchmod)(fd, mode);
}
int flock(int fd, int operation) {
    ON_FD("flock", fd, OTHER, -1)
    return REAL(flock)(fd, operation);
}

/* --- Asking. */
int statx(int dirfd, const char *restrict path, int flags, unsigned mask, struct statx *restrict into) {
    /* The standard library probes with no path at all, which the declaration forbids. */
    const char *volatile given = path;
    int counted = given && given[0] ? path_below(dirfd, path) : fd_below(dirfd);
    if (counted && fault("statx", OTHER) == FAIL)
        return -1;
    return REAL(statx)(dirfd, path, flags, mask, into);
}
/* Rust calls the names that end in 64, C programs the others. */
#define STAT(name, type)                                               \
    int name(const char *restrict path, struct type *restrict into) {  \
        ON_PATH("stat", AT_FDCWD, path, OTHER, -1)                     \
        return REAL(name)(path, into);                                 \
    }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)

#define FSTAT(name, type)                                              \
    int name(int fd, struct type *into) {                              \
        ON_FD("fstat", fd, OTHER, -1)                                  \
        return REAL(name)(fd, into);                                   \
    }
FSTAT(fstat, stat)
FSTAT(fstat64, stat64)
DIR *opendir(const char *path) {
    ON_PATH("opendir", AT_FDCWD, path, OTHER, NULL)
    return REAL(opendir)(path);
}
DIR *fdopendir(int fd) {
    ON_FD("fdopendir", fd, OTHER, NULL)
    return REAL(fdopendir)(fd);
}
struct dirent64 *readdir64(DIR *folder) {
    ON_FD("readdir", dirfd(folder), OTHER, NULL)
    return REAL(readdir64)(folder);
}

/* --- System calls that no function of the C library makes. */
#ifdef __x86_64__
static void on_renameat(int signal, siginfo_t *info, void *context) {
    (void)signal;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    if (info->si_syscall != SYS_renameat)
        return;
    int saved = errno;
    int to_fd = (int)registers[REG_RDX];
    const char *to = (const char *)registers[REG_R10];
    long result = -1;
    if (!path_below(to_fd, to) || fault("renameat", OTHER) != FAIL)
        /* The same with no flags, which is not trapped. */
        result = syscall(SYS_renameat2, (int)registers[REG_RDI], registers[REG_RSI], to_fd, to, 0);
    registers[REG_RAX] = result < 0 ? -errno : result;
    errno = saved;
}

static void trap_renameat(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    struct sigaction action = {.sa_sigaction = on_renameat, .sa_flags = SA_SIGINFO};
    if (sigaction(SIGSYS, &action, NULL) || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) {
        perror("renameat cannot be trapped");
        abort();
    }
}
#else
static void trap_renameat(void) {}
#endif
