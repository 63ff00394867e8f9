"""The inside of the sandbox: a script that shuts itself in and then runs code it was given.

It is started by `sandbox.run_python` in a process of its own, with the standard library only:
argv[1] is the limits as JSON, argv[2] the number of a pipe that gets a byte once the walls stand,
standard input is the code. From outside in: namespaces of its own (users, mounts, processes,
network, names), a root of a small memory file system with the interpreter's directories read-only
in it, a user that owns nothing, no capabilities and no way to any, resource limits, no environment.
"""

import ctypes
import json
import os
import resource
import signal
import sys

NOBODY = 65534
# Linux's numbers: clone, mount and prctl flags.
NEW_SPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
READ_ONLY, NO_SUID, NO_DEV, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
KEPT_FLAGS = 1 | 2 | 4 | 8 | 1024 | 2048  # a remount may not take these from a mount
PARENT_DEATH, DROP_BOUND, NO_NEW_PRIVILEGES = 1, 24, 38
ROOT, BOX = "/tmp", "/box"

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    """A call of the C library that must succeed."""
    function = libc[name]
    if function(*[x.encode() if isinstance(x, str) else x for x in arguments]) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def prctl(option: int, value: int) -> None:
    """prctl of one argument."""
    call("prctl", option, *map(ctypes.c_ulong, (value, 0, 0, 0)))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2)."""
    call("mount", source, target, kind, ctypes.c_ulong(flags), data)


def write(path: str, text: str) -> None:
    """Write a file that is there."""
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, text.encode())
    os.close(fd)


def enter_spaces() -> None:
    """Own namespaces, in which this process is privileged.

    Another user than root is user 0 there. Root is user 1, and its 0 is `NOBODY` outside: what runs
    as 0 owns none of root's files, and the limit on processes, which spares root, holds for it. A
    child waits until its users are known, which its parent alone may say; only the child returns.
    """
    user, group = os.geteuid(), os.getegid()
    unshared, known = os.pipe(), os.pipe()
    if child := os.fork():
        os.close(unshared[1])
        os.close(known[0])
        if os.read(unshared[0], 1):
            if user:
                write(f"/proc/{child}/setgroups", "deny")
            for kind, own in (("uid", user), ("gid", group)):
                outside = f"0 {NOBODY} 1\n1 0 1" if user == 0 else f"0 {own} 1"
                write(f"/proc/{child}/{kind}_map", outside)
            os.write(known[1], b"1")
        os._exit(wait(child))
    prctl(PARENT_DEATH, signal.SIGKILL)
    if user == 0:
        os.setgroups([])
    call("unshare", NEW_SPACES)
    os.write(unshared[1], b"1")
    if not os.read(known[0], 1):
        raise OSError("the parent could not say who this user is")
    for fd in (*unshared, *known):
        os.close(fd)


def show(path: str) -> None:
    """Make a directory, or the link that stands there, visible below the new root, read-only."""
    if os.path.islink(path):
        os.symlink(os.readlink(path), ROOT + path)
    elif os.path.isdir(path) and not os.path.ismount(ROOT + path):
        os.makedirs(ROOT + path, exist_ok=True)
        mount(path, ROOT + path, "", BIND | RECURSIVE)
        kept = os.statvfs(ROOT + path).f_flag & KEPT_FLAGS
        mount("", ROOT + path, "", BIND | REMOUNT | READ_ONLY | NO_SUID | NO_DEV | kept)


def build_root(code: bytes, limits: dict[str, int]) -> None:
    """A root with the interpreter, a null device, and a directory to work in, all else hidden."""
    os.umask(0o022)
    mount("", "/", "", RECURSIVE | PRIVATE)
    size = f"size={limits['disk_bytes']},nr_inodes={limits['files']},mode=755"
    mount("tmpfs", ROOT, "tmpfs", NO_SUID | NO_DEV, size)
    for path in ("/usr", "/lib", "/lib64", "/bin", sys.base_prefix):
        if not any(path.startswith(f"{seen}/") for seen in ("/usr", "/lib")):
            show(path)
    os.makedirs(ROOT + "/dev")
    os.close(os.open(ROOT + "/dev/null", os.O_CREAT, 0o666))
    mount("/dev/null", ROOT + "/dev/null", "", BIND)
    os.makedirs(ROOT + BOX)
    fd = os.open(f"{ROOT}{BOX}/main.py", os.O_CREAT | os.O_WRONLY, 0o644)
    while code:
        code = code[os.write(fd, code) :]
    os.close(fd)
    os.chown(ROOT + BOX, 0, 0)
    os.chroot(ROOT)
    os.chdir(BOX)


def give_up_privileges() -> None:
    """No capability can be had again, by running whatever program."""
    for capability in range(64):
        try:
            prctl(DROP_BOUND, capability)
        except OSError:  # beyond the kernel's last
            break
    prctl(NO_NEW_PRIVILEGES, 1)


def limit(limits: dict[str, int]) -> None:
    """The resource limits, of every process."""
    for kind, value in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def wait(pid: int) -> int:
    """The exit code of a child, 128 + the signal that ended it; others are reaped by the way."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def main() -> None:
    """Shut in, run, and pass on how it ended."""
    limits, ready = json.loads(sys.argv[1]), int(sys.argv[2])
    code = sys.stdin.buffer.read()
    enter_spaces()
    if first := os.fork():
        os.close(ready)
        os._exit(wait(first))
    # The first process of the namespace: when it ends, so do all others.
    prctl(PARENT_DEATH, signal.SIGKILL)
    build_root(code, limits)
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    give_up_privileges()
    if second := os.fork():
        os.write(ready, b"1")
        os.close(ready)
        os._exit(wait(second))
    os.closerange(3, 4096)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)  # nobody, from here on
    limit(limits)
    interpreter = os.path.realpath(sys.executable)
    os.execve(interpreter, [interpreter, "-I", "-S", "-B", "main.py"], {})


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
        os._exit(125)
