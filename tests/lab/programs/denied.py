"""Run a program whose processes the kernel denies some of its calls, as a container may:
denied.py ERRNO CALL... -- PROGRAM...

By a filter of seccomp(2), which all that it starts inherits.
"""

import ctypes
import os
import platform
import struct
import sys

#: the calls' numbers, on x86_64 and on aarch64; -1: there is none
CALLS = {
    "adjtimex": (159, 171), "bind": (49, 200), "clock_adjtime": (305, 266), "clone3": (435, 435),
    "close_range": (436, 436), "connect": (42, 203), "copy_file_range": (326, 285),
    "fchmod": (91, 52), "flock": (73, 32), "fork": (57, -1), "fstatfs": (138, 44),
    "getdents64": (217, 61), "getpriority": (140, 141), "getrandom": (318, 278),
    "getsockopt": (55, 209), "inotify_init1": (294, 26), "ioprio_set": (251, 30), "kill": (62, 129),
    "link": (86, -1), "linkat": (265, 37), "listen": (50, 201), "memfd_create": (319, 279),
    "mkdir": (83, -1), "mkdirat": (258, 34), "pidfd_open": (434, 434), "poll": (7, -1),
    "ppoll": (271, 73), "prctl": (157, 167), "prlimit64": (302, 261),
    "process_vm_readv": (310, 270), "pselect6": (270, 72), "readlink": (89, -1),
    "recvmsg": (47, 212), "rename": (82, -1), "renameat": (264, 38),
    "sched_setscheduler": (144, 119), "select": (23, -1), "sendfile": (40, 71),
    "sendmsg": (46, 211), "sendto": (44, 206),
    "setpgid": (109, 154), "setpriority": (141, 140), "setsid": (112, 157),
    "setsockopt": (54, 208), "shutdown": (48, 210), "socket": (41, 198), "socketpair": (53, 199),
    "statfs": (137, 43), "umask": (95, 166), "unlink": (87, -1), "utimensat": (280, 88),
    "vfork": (58, -1), "wait4": (61, 260), "waitid": (247, 95),
}  # fmt: skip
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
#: of a filter: load the call's number; the next line where it is another one; what is returned
_LOAD, _IS, _RETURN = 0x20, 0x15, 0x06
_ERRNO, _ALLOW = 0x0005_0000, 0x7FFF_0000


def deny(error, calls):
    """From now on."""
    lines = [(_LOAD, 0, 0, 0)]
    for call in calls:
        number = CALLS[call][platform.machine() == "aarch64"]
        if number >= 0:
            lines += [(_IS, 0, 1, number), (_RETURN, 0, 0, _ERRNO | error)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HP", len(lines), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(_NO_NEW_PRIVILEGES, ctypes.c_ulong(1), zero, zero, zero):
        raise OSError(ctypes.get_errno(), "no_new_privs")
    if libc.prctl(_SECCOMP, ctypes.c_ulong(_FILTER), program, zero, zero):
        raise OSError(ctypes.get_errno(), "seccomp")


if __name__ == "__main__":
    at = sys.argv.index("--")
    deny(int(sys.argv[1]), sys.argv[2:at])
    os.execvp(sys.argv[at + 1], sys.argv[at + 1 :])
