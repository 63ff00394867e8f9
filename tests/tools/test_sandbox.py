"""Code that tries to get out, to stay, or to take more than it may have."""

import os
import time
from pathlib import Path

import pytest

from purepost.tools import Limits, run_python, sandbox
from purepost.tools.sandbox import Finished

QUICK = Limits(seconds=5.0, cpu_seconds=2)


@pytest.fixture(scope="module", autouse=True)
def walls() -> None:
    """Skip where the kernel lets nobody build them; that it then says so is a test of its own."""
    try:
        run_python("pass")
    except OSError as error:
        pytest.skip(f"no sandbox here: {error}")


def run(code: str, limits: Limits = QUICK) -> Finished:
    return run_python(code, limits)


def tries(code: str) -> str:
    """What an attempt ends in: the exception's name, or "done"."""
    lines = "\n".join(f"    {line}" for line in code.splitlines())
    found = run(
        f"try:\n{lines}\n    print('done')\nexcept BaseException as e:\n    print(type(e).__name__)"
    )
    return found.stdout.split()[-1]


def test_what_is_printed_is_the_result() -> None:
    found = run("import math, sys\nprint(math.factorial(20), 'ü')\nprint('so', file=sys.stderr)")
    assert found == Finished(f"{2432902008176640000} ü\n", "so\n", 0)
    assert found.text == "2432902008176640000 ü\nso"
    assert run("").text == ""


def test_errors_are_told() -> None:
    found = run("def f():\n    return 1 / 0\nf()")
    assert found.code == 1 and "ZeroDivisionError" in found.stderr and "line 2" in found.stderr
    assert found.text.endswith("exit code 1")
    assert run("import sys; sys.exit(7)").code == 7
    assert run("x = ").stderr.strip().endswith("SyntaxError: invalid syntax")


def test_nothing_is_seen_of_the_machine(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")
    os.environ["PUREPOST_SECRET"] = "42"
    try:
        assert run("import os; print(dict(os.environ))").stdout in (
            "{}\n",
            "{'LC_CTYPE': 'C.UTF-8'}\n",
        )
    finally:
        del os.environ["PUREPOST_SECRET"]
    for path in (secret, "/etc/passwd", "/home", "/proc", "/sys", Path(__file__)):
        assert run(f"import os; print(os.path.exists({str(path)!r}))").stdout == "False\n"
    assert run("import os; print(os.getcwd(), os.listdir('.'))").stdout == "/box ['main.py']\n"
    assert run("import os; print(os.listdir('/dev'))").stdout == "['null']\n"


def test_nothing_can_be_changed() -> None:
    assert tries("open('/usr/x', 'w')") in ("OSError", "PermissionError")
    assert tries("import os; os.remove(os.__file__)") in ("OSError", "PermissionError")
    assert tries("open('x', 'w').write('x'); assert open('x').read() == 'x'") == "done"
    assert run("import os; print(os.path.exists('x'))").stdout == "False\n"  # each run is alone


def test_there_is_no_network() -> None:
    connect = "import socket\nsocket.create_connection(('{}', {}), timeout=2)"
    for host, port in (("127.0.0.1", 22), ("8.8.8.8", 53), ("example.com", 80)):
        assert tries(connect.format(host, port)) in (
            "OSError",
            "gaierror",
            "ConnectionRefusedError",
        )
    names = run("import socket; print([n for _, n in socket.if_nameindex()])").stdout
    assert names.strip() in ("['lo']", "[]")


def test_no_way_leads_out() -> None:
    escape = (
        "import os\nos.mkdir('d')\nfd = os.open('/', os.O_RDONLY)\nos.chroot('d')\n"
        "os.fchdir(fd)\n[os.chdir('..') for _ in range(9)]\nos.chroot('.')"
    )
    assert tries(escape) == "PermissionError"
    c = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n{}\nos.strerror(0)"
    for call in (
        "unshare(0x10000000)",  # another user namespace
        "mount(b'none', b'/box', b'tmpfs', 0, b'')",
        "umount2(b'/usr', 2)",
        "ptrace(16, 1, 0, 0)",
        "sethostname(b'x', 1)",
    ):
        assert tries(c.format(f"assert libc.{call} == 0")) == "AssertionError"
    assert tries("import os; os.setuid(1)") in ("OSError", "PermissionError")
    assert run("import os; print(os.getuid(), os.getpid())").stdout == "0 2\n"  # root of nothing
    assert tries("import os; os.kill(1, 9)") in ("done", "PermissionError")  # in vain


def test_hanging_ends_by_the_clock() -> None:
    start = time.monotonic()
    found = run("print('first', flush=True)\nimport time\ntime.sleep(99)", Limits(seconds=1.0))
    assert found.cut == "time" and found.stdout == "first\n"
    assert "limit on time was reached" in found.text
    assert time.monotonic() - start < 4


def test_working_ends_by_the_processors_clock() -> None:
    found = run("while True: pass", Limits(seconds=20, cpu_seconds=1))
    assert found.cut is None and found.code in (128 + 9, 128 + 24)
    assert "stopped by signal" in found.text


def test_memory_is_bounded() -> None:
    assert tries("x = bytearray(2**30)") == "MemoryError"
    small = Limits(memory_bytes=64 * 2**20)
    assert "MemoryError" in run("x = [bytes(2**20) for _ in range(200)]", small).stderr


def test_the_disk_cannot_be_filled() -> None:
    assert tries("f = open('x', 'wb')\nfor _ in range(40): f.write(bytes(2**20))\nf.close()") == (
        "OSError"
    )
    many = "for i in range(40): open(f'x{i}', 'wb').write(bytes(2**20))"
    assert tries(many) == "OSError"
    assert tries("for i in range(2000): open(f'x{i}', 'w').close()") == "OSError"
    assert tries("[open('main.py') for _ in range(200)]") == "OSError"


def test_forks_are_bounded_and_do_not_outlive_the_run() -> None:
    bomb = "import os, time\nfor _ in range(100):\n    if not os.fork():\n        time.sleep(60)"
    start = time.monotonic()
    assert tries(bomb) == "BlockingIOError"
    # The child leaves the session and keeps the pipes open, to no avail.
    stay = "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(60)\nprint('gone')"
    found = run(stay)
    assert found.stdout == "gone\n" and found.cut is None
    assert time.monotonic() - start < 8


def test_output_is_bounded() -> None:
    found = run("while True: print('x' * 1000)", Limits(output_bytes=10_000))
    assert found.cut == "output" and len(found.stdout) <= 10_000


def test_odd_programs() -> None:
    assert run("print(1)\x00").code == 1
    assert "SyntaxError" in run("\ud800").stderr or run("\ud800").code == 1
    long = "x = 1\n" * 150_000 + "print(x)"
    assert run(long).stdout == "1\n"
    assert run("import os; os.close(0); os.close(1); os.close(2)").code == 0
    assert run("import sys; print(sys.stdin.read())").stdout == "\n"
    assert run("import numpy").code == 1  # the standard library alone


def test_where_no_wall_can_be_built_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jail = tmp_path / "jail.py"
    source = sandbox.JAIL.read_text()
    jail.write_text(source.replace('call("unshare", NEW_SPACES)', 'call("unshare", 1)'))
    monkeypatch.setattr(sandbox, "JAIL", jail)
    with pytest.raises(OSError, match="user may make namespaces .* got .*Invalid argument"):
        run("print('never')")
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(OSError, match="expected Linux"):
        run("print('never')")


def test_limits_are_positive() -> None:
    with pytest.raises(ValueError, match="expected limits > 0, got {'files': 0}"):
        Limits(files=0)
