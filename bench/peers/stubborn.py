"""stubborn.py FOLDER: rank 0 ignores SIGTERM for ever; rank 1 exits with 3 in the first attempt. In the second both are done at once.

FOLDER/started gets a line "attempt rank pid time.monotonic()" a process, and FOLDER/failed rank 1's last moment.
"""
import os
import signal
import sys
import time

folder, rank, attempt = sys.argv[1], os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
log = os.open(f"{folder}/started", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(log, f"{attempt} {rank} {os.getpid()} {time.monotonic()}\n".encode())
if attempt == "0" and rank == "0":
    time.sleep(600)
if attempt == "0":
    while b"0 0 " not in open(f"{folder}/started", "rb").read():
        time.sleep(0.005)
    with open(f"{folder}/failed", "w") as file:
        file.write(str(time.monotonic()))
    os._exit(3)
