"""Another user of the node, who holds what she can: holding.py FOLDER NAME...

In FOLDER she lays files that she has locked; NAMEs that begin with @ are sockets without a file, to
which so many have connected that no one else can. It prints a line once it is so.
"""

import contextlib
import fcntl
import os
import signal
import socket
import sys

held = []
os.umask(0)
for name in sys.argv[2:]:
    if name.startswith("@"):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + name[1:])
        listener.listen(0)
        held.append(listener)
        for _ in range(3):
            asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            asking.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                asking.connect("\0" + name[1:])
            held.append(asking)
    else:
        file = os.open(os.path.join(sys.argv[1], name), os.O_CREAT | os.O_RDWR, 0o666)
        fcntl.flock(file, fcntl.LOCK_EX)
        held.append(file)
print("holds", flush=True)
signal.pause()
