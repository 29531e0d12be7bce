"""A warm template of Python programs: imports MODULES once, then forks ranks that run the job's
unmodified script.

  outlast run -n 4 --template 'python3 -m outlast_template torch numpy' -- train.py

MODULES are what the script imports and takes long: names, apart by blanks or commas. They must
start no thread and touch no GPU when they are imported, nor look for the rank (RANK and its like
are set in the forks only). A rank finds `random` and numpy's global generator seeded anew, and
torch's as in a process of its own. The protocol: src/run/template_wire.h.
"""
import array
import ctypes
import gc
import importlib
import importlib.machinery
import io
import os
import runpy
import socket
import struct
import sys
import types

VERSION, FIRST_VERSION = 2, 1
START, FORK = 1, 2
READY, FORKED, REFUSED = 1, 2, 3
LONGEST_MESSAGE = 128 << 10
MOST_DESCRIPTORS = 16
PR_SET_PDEATHSIG, SIGKILL = 1, 9
MPOL_PREFERRED = 1
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
TAG = b"OUTLAST_SLOT_TAG="


class Reader:
    """Fields of a message."""

    def __init__(self, data):
        self._data = data
        self._at = 0

    def number(self, form):
        (value,) = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return value

    def text(self):
        size = self.number("I")
        if self._at + size > len(self._data):
            raise struct.error("a text that ends behind its message")
        self._at += size
        return os.fsdecode(self._data[self._at - size:self._at])

    def texts(self):
        return [self.text() for _ in range(self.number("I"))]


class Command:
    """What a forked rank runs, from the job's command line; `refusal` says why it cannot."""

    def __init__(self, program, arguments, own_program):
        self.refusal = self._other_python(program, own_program)
        self.unbuffered = False
        self.module = self.script = None
        self.arguments = []
        self.words = arguments[1:]
        rest = arguments[1:]
        while rest and not self.refusal:
            word = rest.pop(0)
            if word == "-u":
                self.unbuffered = True
            elif word == "-m" and rest:
                self.module, self.arguments = rest[0], rest[1:]
                return
            elif word.startswith("-"):
                self.refusal = f"python's option {word} is not for a template"
            else:
                self.script, self.arguments = word, rest
                return
        self.refusal = self.refusal or "the command names no script"

    @staticmethod
    def _other_python(program, own_program):
        # By the folder too: environments share one file. And by what we were started as, which may
        # be a wrapper (pyenv).
        def place(path):
            return os.path.realpath(os.path.dirname(path)), os.path.realpath(path)

        if place(program) in (place(sys.executable), place(own_program)):
            return ""
        return f"the command runs {program}, the template is {sys.executable}"

    def search_path(self):
        """The first entry of sys.path: the script's folder, or for a module the working one."""
        return os.path.dirname(os.path.realpath(self.script)) if self.script else os.getcwd()

    def run(self):
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        sys.argv = [self.script or self.module] + self.arguments
        sys.orig_argv = [sys.executable] + self.words  # what starts the program once more
        if self.module:
            runpy._run_module_as_main(self.module)  # as python -m does it
            return
        main.__file__ = os.path.abspath(self.script)
        main.__builtins__ = __builtins__
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", main.__file__)
        with io.open_code(main.__file__) as file:
            code = compile(file.read(), main.__file__, "exec")
        exec(code, main.__dict__)


def own_environment():
    """Takes back what was set for us to be found: ranks have the user's own PYTHONPATH."""
    folder = os.path.dirname(os.path.abspath(__file__))
    if folder in sys.path[1:]:
        sys.path.remove(folder)
    before = os.environ.pop("OUTLAST_TEMPLATE_PYTHONPATH", None)
    if before is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = before


def place_of_tag():
    """Address and size of the tag's value in the memory that /proc/self/environ shows."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    block = ctypes.string_at(start, end - start)
    at = block.find(TAG) + len(TAG)
    return (start + at, block.index(b"\0", at) - at) if at >= len(TAG) else (0, 0)


def why_not_forked():
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        return (f"it has {threads} threads, 1 wanted (MODULES start some; "
                "OMP_NUM_THREADS=1 keeps numerical ones from it)")
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink("/proc/self/fd/" + name)
        except OSError:
            continue
        if target.startswith("/dev/nvidia"):
            return f"it holds {target} open: CUDA was touched"
    return ""


class Request:
    def __init__(self, reader, descriptors):
        self.number = reader.number("Q")
        self.guardian = reader.number("i")
        (self.gate,) = descriptors


class Role:
    def __init__(self, reader, descriptors):
        self.environment = reader.texts()
        self.names = reader.texts()
        self.numa = reader.number("i")
        self.standard, self.handed_down = descriptors[:3], descriptors[3:]
        if len(self.standard) != 3 or len(self.handed_down) != len(self.names):
            raise struct.error(f"{len(descriptors)} descriptors")


def receive(end):
    """A packet and its descriptors; exits at the end of file."""
    descriptors = array.array("i")
    data, ancillary, _, _ = end.recvmsg(
        LONGEST_MESSAGE, socket.CMSG_SPACE(MOST_DESCRIPTORS * descriptors.itemsize),
        socket.MSG_CMSG_CLOEXEC)
    if not data:
        os._exit(0)  # the job has ended
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[:len(content) - len(content) % descriptors.itemsize])
    return Reader(data), descriptors.tolist()


class Server:
    def __init__(self, descriptor):
        os.set_inheritable(descriptor, False)
        self._guardian = socket.socket(fileno=descriptor)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._tag = place_of_tag()
        reader, _ = receive(self._guardian)
        kind, version = reader.number("B"), reader.number("I")
        if kind != START or version != FIRST_VERSION:
            sys.exit("outlast_template: the launcher begins with version "
                     f"{version}, {FIRST_VERSION} wanted")
        own_program = os.environ.pop("OUTLAST_TEMPLATE_PROGRAM", sys.executable)
        self.command = Command(reader.text(), reader.texts(), own_program)
        newest = reader.number("I")  # of an older launcher we would not be here
        if newest < VERSION:
            sys.exit(f"outlast_template: the launcher speaks version {newest}, {VERSION} wanted")

    def serve(self):
        """Forks as it is asked; returns in the forks."""
        self._guardian.send(struct.pack("<BI", READY, VERSION))
        while True:
            reader, descriptors = receive(self._guardian)
            if reader.number("B") != FORK:
                sys.exit("outlast_template: a message that is no request")
            request = Request(reader, descriptors)
            why = self.command.refusal or why_not_forked()
            if not why and self._fork(request):
                self._become_rank(request)
                return
            if why:
                text = why.encode("utf-8", "replace")
                self._guardian.send(
                    struct.pack("<BQI", REFUSED, request.number, len(text)) + text)
            for descriptor in descriptors:
                os.close(descriptor)

    def _fork(self, request):
        """True in the child, whose parent is the guardian once the process between has ended."""
        ours, theirs = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child != 0:
                os.write(theirs, struct.pack("<i", child))
                os._exit(0)
            os.close(ours)
            os.close(theirs)
            return True
        os.close(theirs)
        told = os.read(ours, 4)
        os.close(ours)
        os.waitpid(between, 0)
        if len(told) == 4:
            self._guardian.send(struct.pack("<BQ", FORKED, request.number) + told)
        return False

    def _become_rank(self, request):
        os.setpgid(0, 0)
        self._guardian.close()
        with socket.socket(fileno=request.gate) as gate:
            role = Role(*receive(gate))
        self._libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        if os.getppid() != request.guardian:
            os._exit(127)
        for number, descriptor in enumerate(role.standard):
            os.dup2(descriptor, number)
            os.close(descriptor)
        for name, descriptor in zip(role.names, role.handed_down):
            os.set_inheritable(descriptor, True)
            os.environ[name] = str(descriptor)
        for variable in role.environment:
            name, _, value = variable.partition("=")
            os.environ[name] = value
        self._show_tag(os.fsencode(os.environ.get("OUTLAST_SLOT_TAG", "")))
        self._prefer_memory_of(role.numa)

    def _show_tag(self, tag):
        address, room = self._tag
        if len(tag) <= room:
            ctypes.memmove(address, tag + bytes(room - len(tag)), room)

    def _prefer_memory_of(self, numa):
        number = SET_MEMPOLICY.get(os.uname().machine)
        if 0 <= numa < 1024 and number is not None:
            nodes = (ctypes.c_ulong * 16)()
            nodes[numa // 64] = 1 << numa % 64
            self._libc.syscall(number, MPOL_PREFERRED, nodes, ctypes.c_ulong(1025))


def open_standard_files(unbuffered):
    """As a new interpreter opens them: ours belong to the template's own files."""

    def output(number, errors, line_buffering):
        file = open(number, "wb", 0 if unbuffered else -1, closefd=False)
        return io.TextIOWrapper(file, sys.__stdout__.encoding, errors, "\n",
                                line_buffering or os.isatty(number), unbuffered)

    sys.stdin = sys.__stdin__ = open(0, encoding=sys.__stdout__.encoding, closefd=False)
    sys.stdout = sys.__stdout__ = output(1, sys.__stdout__.errors, False)
    sys.stderr = sys.__stderr__ = output(2, "backslashreplace", True)


def reseed():
    # `random` does so itself in every fork.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    torch = sys.modules.get("torch")
    if hasattr(torch, "initial_seed"):
        torch.manual_seed(torch.initial_seed())


def main():
    descriptor = os.environ.pop("OUTLAST_TEMPLATE_FD", None)
    if descriptor is None:
        sys.exit("outlast_template: for `outlast run --template 'python3 -m outlast_template "
                 "MODULES'` alone")
    own_environment()
    server = Server(int(descriptor))
    sys.path[0] = server.command.search_path()
    folder = os.getcwd()
    for name in " ".join(sys.argv[1:]).replace(",", " ").split():
        importlib.import_module(name)
    sys.stdout.flush()
    gc.collect()
    gc.freeze()  # so that a fork's collector does not copy what all share
    server.serve()
    os.chdir(folder)
    open_standard_files(server.command.unbuffered)
    reseed()
    server.command.run()


if __name__ == "__main__":
    main()
