/* Preloaded into a driver: answers a chosen errno at calls on what lies below $FAULT_FOLDER.
 *
 * $FAULT_CONTROL, a file elsewhere, is read at each such call: empty or absent, nothing fails; "5 write fsync"
 * fails those calls with errno 5, "5 *" all of them. Each failure adds a line to $FAULT_CONTROL.log. A write that
 * fails takes the first half of its bytes before, at the first time that it is tried.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

static int below(const char *path) {
    const char *folder = getenv("FAULT_FOLDER");
    size_t length = folder ? strlen(folder) : 0;
    return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

/* The errno for a call on a path, 0 for none; leaves errno as it was. */
static int fault(const char *call, const char *path) {
    int before = errno, number = 0, file;
    char text[256] = "", absolute[2 * PATH_MAX], name[64];
    const char *control = getenv("FAULT_CONTROL");
    ssize_t size = 0;
    if (!control || !path) return 0;
    if (path[0] != '/') {
        if (!getcwd(absolute, PATH_MAX)) return 0;
        strcat(absolute, "/");
        strncat(absolute, path, PATH_MAX - 1);
        path = absolute;
    }
    if (!below(path)) return 0;
    file = syscall(SYS_openat, AT_FDCWD, control, O_RDONLY | O_CLOEXEC);
    if (file >= 0) {
        size = syscall(SYS_read, file, text + 1, sizeof text - 3);
        syscall(SYS_close, file);
    }
    if (file >= 0 && size > 0) {
        text[0] = text[size + 1] = ' ';
        text[size + 2] = 0;
        snprintf(name, sizeof name, " %s ", call);
        if (strstr(text, " * ") || strstr(text, name)) number = atoi(text + 1);
    }
    if (number) {
        char line[PATH_MAX + 64], log[PATH_MAX];
        snprintf(log, sizeof log, "%s.log", control);
        size = snprintf(line, sizeof line, "%s %s\n", call, path);
        file = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (file >= 0) {
            syscall(SYS_write, file, line, size);
            syscall(SYS_close, file);
        }
    }
    errno = before;
    return number;
}

static int fault_at(const char *call, int folder, const char *path) {
    char whole[2 * PATH_MAX], link[64];
    ssize_t size;
    if (folder == AT_FDCWD || (path && path[0] == '/')) return fault(call, path);
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    size = syscall(SYS_readlinkat, AT_FDCWD, link, whole, PATH_MAX - 1);
    errno = before;
    if (size <= 0) return 0;
    whole[size] = 0;
    if (path && path[0]) {
        strcat(whole, "/");
        strncat(whole, path, PATH_MAX - 1);
    }
    return fault(call, whole);
}

static int fault_of(const char *call, int file) { return fault_at(call, file, ""); }

#define REAL(type, name, args) static type(*real) args; if (!real) real = dlsym(RTLD_NEXT, name)
#define FAIL(number, result) do { int n = (number); if (n) { errno = n; return result; } } while (0)

#define OPEN(symbol) \
    int symbol(const char *path, int flags, ...) { \
        REAL(int, #symbol, (const char *, int, ...)); \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        FAIL(fault("open", path), -1); \
        return real(path, flags, mode); }
OPEN(open) OPEN(open64)
#define OPENAT(symbol) \
    int symbol(int at, const char *path, int flags, ...) { \
        REAL(int, #symbol, (int, const char *, int, ...)); \
        va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        FAIL(fault_at("open", at, path), -1); \
        return real(at, path, flags, mode); }
OPENAT(openat) OPENAT(openat64)
DIR *opendir(const char *path) {
    REAL(DIR *, "opendir", (const char *));
    FAIL(fault("open", path), NULL);
    return real(path);
}

#define ON_PATH(symbol, call, args, names) \
    int symbol args { REAL(int, #symbol, args); FAIL(fault(call, path), -1); return real names; }
#define ON_PATH_AT(symbol, call, args, names) \
    int symbol args { REAL(int, #symbol, args); FAIL(fault_at(call, at, path), -1); return real names; }
#define ON_FILE(type, symbol, call, args, names) \
    type symbol args { REAL(type, #symbol, args); FAIL(fault_of(call, file), -1); return real names; }
ON_PATH(stat, "stat", (const char *path, struct stat *to), (path, to))
ON_PATH(lstat, "stat", (const char *path, struct stat *to), (path, to))
ON_PATH(stat64, "stat", (const char *path, struct stat64 *to), (path, to))
ON_PATH(lstat64, "stat", (const char *path, struct stat64 *to), (path, to))
ON_PATH_AT(fstatat, "stat", (int at, const char *path, struct stat *to, int flags), (at, path, to, flags))
ON_PATH_AT(fstatat64, "stat", (int at, const char *path, struct stat64 *to, int flags), (at, path, to, flags))
ON_FILE(int, fstat, "stat", (int file, struct stat *to), (file, to))
ON_FILE(int, fstat64, "stat", (int file, struct stat64 *to), (file, to))
ON_PATH(mkdir, "mkdir", (const char *path, mode_t mode), (path, mode))
ON_PATH_AT(mkdirat, "mkdir", (int at, const char *path, mode_t mode), (at, path, mode))
ON_PATH(unlink, "unlink", (const char *path), (path))
ON_PATH_AT(unlinkat, "unlink", (int at, const char *path, int flags), (at, path, flags))
ON_PATH(rename, "rename", (const char *path, const char *to), (path, to))
ON_PATH_AT(renameat, "rename", (int at, const char *path, int to_at, const char *to), (at, path, to_at, to))
ON_PATH(link, "link", (const char *path, const char *to), (path, to))
ON_PATH_AT(linkat, "link", (int at, const char *path, int to_at, const char *to, int flags), (at, path, to_at, to, flags))
ON_PATH_AT(utimensat, "utime", (int at, const char *path, const struct timespec to[2], int flags), (at, path, to, flags))
ON_PATH(utimes, "utime", (const char *path, const struct timeval to[2]), (path, to))
ON_FILE(int, futimens, "utime", (int file, const struct timespec to[2]), (file, to))
ON_FILE(int, fsync, "fsync", (int file), (file))
ON_FILE(int, fdatasync, "fsync", (int file), (file))
ON_FILE(int, flock, "flock", (int file, int how), (file, how))
ON_FILE(int, ftruncate, "truncate", (int file, off_t size), (file, size))
ON_FILE(int, ftruncate64, "truncate", (int file, off64_t size), (file, size))
ON_FILE(ssize_t, read, "read", (int file, void *to, size_t size), (file, to, size))
ON_FILE(ssize_t, pread, "read", (int file, void *to, size_t size, off_t at), (file, to, size, at))
ON_FILE(ssize_t, pread64, "read", (int file, void *to, size_t size, off64_t at), (file, to, size, at))
ON_FILE(ssize_t, pwrite, "write", (int file, const void *from, size_t size, off_t at), (file, from, size, at))
ON_FILE(ssize_t, pwrite64, "write", (int file, const void *from, size_t size, off64_t at), (file, from, size, at))

ssize_t write(int file, const void *from, size_t size) {
    REAL(ssize_t, "write", (int, const void *, size_t));
    static __thread int halved;
    int number = fault_of("write", file);
    if (number && size > 1 && !halved) {
        halved = 1;
        return real(file, from, size / 2);
    }
    if (number) {
        errno = number;
        return -1;
    }
    halved = 0;
    return real(file, from, size);
}
