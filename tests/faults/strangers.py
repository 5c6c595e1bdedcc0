#!/usr/bin/env python3
"""Sends mutations of a job's own messages to all of its ports while it trains, and compares it with the same job left alone.

    strangers.py --worker SOAK_WORKER [--count 1000000] [--steps 3000] [--transport arena|gloo] [--hosts 2] [--secret TEXT] [--ddp]

The messages are those that a first job exchanges, as the kernel shows them (root alone may read them). Then another user of the
host, and, with --hosts, a host that has no part in the job, send COUNT mutations to each port. Hosts are network namespaces.
--ddp: a job of torch.distributed under torchrun in place of SOAK_WORKER's. Prints a table; the exit status tells whether the
attacked job ended well, with the same losses.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NOBODY = 65534
BRIDGE = "tssr-wire"
DDP = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(5)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(100 + rank)
for step in range(1, int(sys.argv[1]) + 1):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 64)).square().mean()
    loss.backward()
    optimizer.step()
    if step % int(sys.argv[2]) == 0:
        print(f"step {step} resident 0 descriptors {len(os.listdir('/proc/self/fd'))} threads 0 loss {loss.item().hex()}", flush=True)
"""


class Hosts:
    """Network namespaces on a bridge; the last one takes no part in the job. Without any, all is on this host."""

    def __init__(self, count: int):
        self.names = [f"tssr-{i}" for i in range(count + 1)] if count > 1 else []
        if not self.names:
            return
        self.close()
        self._ip("link add", BRIDGE, "type bridge")
        self._ip("link set", BRIDGE, "up")
        for i, name in enumerate(self.names):
            self._ip("netns add", name)
            self._ip(f"link add tssr-v{i} type veth peer name eth0 netns {name}")
            self._ip(f"link set tssr-v{i} master {BRIDGE} up")
            for line in (f"addr add {self.address(i)}/24 dev eth0", "link set eth0 up", "link set lo up"):
                self._ip(f"-n {name}", line)

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *" ".join(words).split()], check=True)

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def on(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[host]] if self.names else []

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
        if self.names:
            subprocess.run(["ip", "link", "del", BRIDGE], stderr=subprocess.DEVNULL)


class Job:
    """Two ranks a host, or two on this one."""

    def __init__(self, options, hosts: Hosts, steps: int):
        self.folder = tempfile.mkdtemp(prefix="strangers-")
        self.processes: list[subprocess.Popen] = []
        count, local = max(1, options.hosts), 2
        port = random.randrange(20000, 30000)
        every = str(max(1, steps // 10))
        for host in range(count):
            for index in range(1 if options.ddp else local):
                env = dict(os.environ, OMP_NUM_THREADS="1", TESSERA_TRANSPORT=options.transport, TESSERA_TIMEOUT="60",
                           TESSERA_FLIGHT_DIR=self.folder)
                master = hosts.address(0) if count > 1 else "127.0.0.1"
                if options.ddp:
                    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(count), "--nproc-per-node", str(local),
                               "--node-rank", str(host), "--master-addr", master, "--master-port", str(port), "-c", DDP]
                    program = Path(self.folder) / "ddp.py"
                    program.write_text(DDP)
                    command[-2:] = [str(program), str(steps), every]
                    if count > 1:
                        env["GLOO_SOCKET_IFNAME"] = "eth0"
                else:
                    env |= {"RANK": str(host * local + index), "WORLD_SIZE": str(count * local), "LOCAL_RANK": str(index),
                            "LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": master, "MASTER_PORT": str(port)}
                    if options.secret:
                        env["TESSERA_SECRET"] = options.secret
                    command = [options.worker, str(steps), every, self.folder]
                self.processes.append(subprocess.Popen(hosts.on(host) + command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                                       text=True))
        self.out = ["" for _ in self.processes]

    def read(self, seconds: float = 0) -> None:
        end = time.monotonic() + seconds
        while True:
            pipes = [p.stdout for p in self.processes]
            ready, _, _ = select.select(pipes, [], [], max(0, end - time.monotonic()))
            for i, process in enumerate(self.processes):
                if process.stdout in ready:
                    self.out[i] += os.read(process.stdout.fileno(), 1 << 16).decode(errors="replace")
            if time.monotonic() >= end:
                return

    def wait_for_first_report(self) -> None:
        end = time.monotonic() + 60
        while not all("step " in text for text in self.out) and time.monotonic() < end:
            self.read(0.1)

    def pids(self) -> set[int]:
        found, parents = {p.pid for p in self.processes}, {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                try:
                    parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)[1].split()[1])
                except OSError:
                    pass
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return found

    def ports(self, hosts: Hosts, options) -> set[tuple[int, str, str, int]]:
        """Returns (host, tcp or udp, address, port) of what the job's processes have open for strangers."""
        found = set()
        pids = self.pids()
        for host in range(max(1, options.hosts)):
            lines = subprocess.run(hosts.on(host) + ["ss", "-lntupH"], capture_output=True, text=True, check=True).stdout
            for line in lines.splitlines():
                words = line.split()
                if not {int(pid) for pid in re.findall(r"pid=(\d+)", line)} & pids:
                    continue
                address, port = words[4].rsplit(":", 1)
                found.add((host, words[0], address.strip("[]"), int(port)))
        return found

    def dropped(self) -> list[int]:
        """Returns how many messages the ranks of this host have dropped, from the flight records that SIGUSR1 asks for."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        self.read(1)
        return [json.loads(path.read_text()).get("dropped_messages", 0) for path in sorted(Path(self.folder).glob("rank_*.json"))]

    def wait(self) -> int:
        """Returns the number of processes that did not end with status 0."""
        end = time.monotonic() + 600
        while any(p.poll() is None for p in self.processes) and time.monotonic() < end:
            self.read(0.1)
        self.read(0.2)
        bad = sum(p.poll() != 0 for p in self.processes)
        for process in self.processes:
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        return bad

    def reports(self) -> list[tuple[int, str, int]]:
        """Returns (step, loss, descriptors) of all ranks, sorted."""
        return sorted((int(s), loss, int(d)) for text in self.out
                      for s, d, loss in re.findall(r"step (\d+) .*?descriptors (\d+) threads \d+ loss (\S+)", text))


def messages_of(options, hosts: Hosts) -> list[bytes]:
    """Returns the payloads that a job exchanges from its start on, its questions to a stopped rank among them."""
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3))
    if not hosts.names:
        tap.bind(("lo", 0))  # else all: the ends of the hosts' links are here
    tap.setblocking(False)
    job = Job(options, hosts, 200)
    payloads: set[bytes] = set()

    def take() -> None:
        while True:
            try:
                packet = tap.recv(1 << 16)[14:]
            except BlockingIOError:
                return
            if len(packet) < 28 or packet[0] >> 4 != 4:
                continue
            rest = packet[(packet[0] & 15) * 4:struct.unpack(">H", packet[2:4])[0]]
            payload = rest[8:] if packet[9] == 17 else rest[(rest[12] >> 4) * 4:] if packet[9] == 6 and len(rest) > 12 else b""
            if payload and len(payloads) < 20000:
                payloads.add(payload[:4096])

    stopped = 0
    while any(p.poll() is None for p in job.processes):
        job.read(0.01)
        take()
        if not stopped and all("step " in text for text in job.out):
            stopped = job.processes[-1].pid
            os.kill(stopped, signal.SIGSTOP)
            end = time.monotonic() + 3
            while time.monotonic() < end:
                job.read(0.05)
                take()
            os.kill(stopped, signal.SIGCONT)
    job.wait()
    if not payloads:
        raise RuntimeError("no message of the job was seen")
    return sorted(payloads)


def mutated(messages: list[bytes], draw: random.Random) -> bytes:
    text = bytearray(draw.choice(messages))
    for _ in range(draw.choice((0, 1, 1, 2, 4))):  # some are repeated as they are
        kind, at = draw.randrange(6), draw.randrange(len(text)) if text else 0
        if kind == 0 and text:
            text[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del text[at:at + draw.randrange(1, 9)]
        elif kind == 2:
            text[at:at] = draw.randbytes(draw.randrange(1, 9))
        elif kind == 3:
            text[at:at + 8] = struct.pack("<Q", draw.choice((0, 1, 255, 1 << 31, 1 << 32, (1 << 63) - 1, (1 << 64) - 1)))
        elif kind == 4:
            other = draw.choice(messages)
            text[at:] = other[draw.randrange(len(other)):]
        else:
            text[at:at] = draw.choice((b"9" * 400, b"[" * 2000, b'{"from":', b"-1", b"null", b"1e999", b"\xff\xfe"))
    return bytes(text[:8000])


def attack(target: tuple[int, str, str, int], messages: list[bytes], count: int, seed: int) -> None:
    """Runs in a process of its own."""
    _, protocol, address, port = target
    draw = random.Random(seed)
    pool = [mutated(messages, draw) for _ in range(20000)]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if address in ("*", "0.0.0.0"):
        address = "127.0.0.1"
    if protocol == "udp":
        wire = socket.socket(family, socket.SOCK_DGRAM)
        for i in range(count):
            if i % 20000 == 19999:
                pool = [mutated(messages, draw) for _ in range(20000)]
            try:
                wire.sendto(pool[i % 20000], (address, port))
            except OSError:
                pass
        return
    open_ones: list[socket.socket] = []
    for i in range(count):
        one = socket.socket(family, socket.SOCK_STREAM)
        one.setblocking(False)
        one.connect_ex((address, port))
        open_ones.append(one)
        if len(open_ones) == 64:
            _, writable, _ = select.select([], open_ones, [], 0)
            for ready in writable:
                try:
                    ready.send(pool[draw.randrange(20000)])
                except OSError:
                    pass
            for each in open_ones:
                each.close()
            open_ones.clear()


def attack_all(options, hosts: Hosts, job: Job, messages: list[bytes]) -> list[str]:
    """Attacks all ports at once until each has had its mutations; returns what was attacked, from where."""
    attackers, rows = [], []
    for number, target in enumerate(sorted(job.ports(hosts, options))):
        host, protocol, address, port = target
        places = [host] if not hosts.names else [host, len(hosts.names) - 1]
        for place in places:
            if place != host and address.startswith("127."):
                rows.append(f"{protocol} {address}:{port}: not to be reached from another host")
                continue
            rows.append(f"{protocol} {address}:{port} of host {host}, from {'another user' if place == host else 'a strange host'}")
            pid = os.fork()
            if pid == 0:
                try:
                    os.nice(5)
                    if hosts.names:
                        here = os.open(f"/run/netns/{hosts.names[place]}", os.O_RDONLY)
                        if ctypes.CDLL(None, use_errno=True).setns(here, 0) != 0:
                            raise OSError(ctypes.get_errno(), "setns")
                    os.setgid(NOBODY)
                    os.setuid(NOBODY)
                    attack(target, messages, options.count, number)
                except BaseException as error:
                    print(f"an attack failed: {error!r}", flush=True)
                    os._exit(1)
                os._exit(0)
            attackers.append(pid)
    while attackers:
        job.read(0.2)
        attackers = [pid for pid in attackers if os.waitpid(pid, os.WNOHANG) == (0, 0)]
        if all(p.poll() is not None for p in job.processes):
            rows.append("the job ended before the attack did")
            for pid in attackers:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            break
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", default="")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--transport", default="arena")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--secret", default="", help="TESSERA_SECRET of the ranks")
    parser.add_argument("--ddp", action="store_true")
    options = parser.parse_args()
    hosts = Hosts(options.hosts)
    try:
        messages = messages_of(options, hosts)
        alone = Job(options, hosts, options.steps)
        bad_alone = alone.wait()
        job = Job(options, hosts, options.steps)
        job.wait_for_first_report()
        rows = attack_all(options, hosts, job, messages)
        dropped = [] if options.ddp else job.dropped()
        bad = job.wait()
    finally:
        hosts.close()
    print(f"{len(messages)} messages seen; {options.count} mutations to each port")
    print("\n".join(rows))
    same = [(s, loss) for s, loss, _ in alone.reports()] == [(s, loss) for s, loss, _ in job.reports()]
    descriptors = sorted({d for _, _, d in job.reports()})
    print(f"processes that failed: {bad} of {len(job.processes)} (left alone: {bad_alone}); losses equal: {same} "
          f"({len(job.reports())} reports); descriptors: {descriptors}; "
          f"messages dropped by the watch of each rank: {dropped}")
    if bad or not same:
        print("\n".join(text[-2000:] for text in job.out))
    return int(bad > 0 or not same)


if __name__ == "__main__":
    sys.exit(main())
