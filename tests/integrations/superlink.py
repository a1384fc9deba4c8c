"""A SuperLink with TLS and registered SuperNodes, as processes on this machine that run the app of examples/flower."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped, unused-ignore]
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

ROOT = Path(__file__).parents[2]
APP = ROOT / "examples" / "flower"
ENVIRONMENT = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
FINISHED = "finished:"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def write_certificates(folder: Path) -> None:
    """A certificate authority, and a certificate of the SuperLink for 127.0.0.1."""
    now = datetime.now(timezone.utc)

    def certificate(name: str, key: Any, issuer: str, issuer_key: Any, extensions: list[Any]) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(issuer_key, hashes.SHA256())

    authority, own = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
    root = certificate("test CA", authority, "test CA", authority, [x509.BasicConstraints(ca=True, path_length=None)])
    leaf = certificate("localhost", own, "test CA", authority, [names])
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(root.public_bytes(pem))
    (folder / "server.pem").write_bytes(leaf.public_bytes(pem))
    private = own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.key").write_bytes(private)


def write_key(path: Path) -> None:
    """A key pair of a SuperNode, as `ssh-keygen -t ecdsa -b 384` writes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = serialization.PrivateFormat.OpenSSH, serialization.PublicFormat.OpenSSH
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption()))
    path.chmod(0o600)
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(serialization.Encoding.OpenSSH, public))


class Deployment:
    """Processes that end with it.

    Args:
        folder: for keys, logs and Flower's own files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "home").mkdir()
        connection = f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{folder / "ca.crt"}"\n'
        (folder / "home" / "config.toml").write_text(f'[superlink]\ndefault = "test"\n[superlink.test]\n{connection}')
        binaries = str(Path(sys.executable).parent)
        self.environment = {
            **os.environ,
            **ENVIRONMENT,
            "FLWR_HOME": str(folder / "home"),
            "PATH": os.pathsep.join([binaries, os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT / "src"),
        }
        write_certificates(folder)

    def __enter__(self) -> Deployment:
        tls = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
        self.start(
            "superlink",
            ["flower-superlink", *tls, "--enable-supernode-auth", "--database", "state.db", "--port", str(self.port)],
        )
        wait_for(lambda: answers(self.port), 60, self.log("superlink"))
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self.processes):
            self.kill(name)

    def start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, name: str) -> None:
        """Kill a process and what it started, without a goodbye."""
        process = self.processes.pop(name)
        started = children(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also of a process that has ended, and left others behind
        for each in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        process.wait(timeout=30)

    def log(self, name: str) -> Callable[[], str]:
        return lambda: (self.folder / f"{name}.log").read_text(errors="replace")

    def flwr(self, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["flwr", *arguments], cwd=APP, env=self.environment, capture_output=True, text=True, timeout=timeout
        )

    def register(self, node: int) -> None:
        write_key(self.folder / f"node{node}")
        done = self.flwr("supernode", "register", str(self.folder / f"node{node}.pub"), "test")
        assert done.returncode == 0, done.stdout + done.stderr

    def start_node(self, node: int, nodes: int, key: str | None = None) -> None:
        command = ["flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--root-certificates", "ca.crt"]
        command += ["--auth-supernode-private-key", key or f"node{node}", "--port", str(free_port())]
        self.start(f"node{node}", [*command, "--node-config", f"partition-id={node} num-partitions={nodes}"])

    def restart_until_accepted(self, node: int, nodes: int, seconds: float = 150) -> None:
        """Start a SuperNode again and again, as a supervisor does: it is refused while the dead one seems online."""
        deadline = time.monotonic() + seconds
        while True:
            self.start_node(node, nodes)
            process = self.processes[f"node{node}"]
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
            if process.poll() is None:
                return
            self.kill(f"node{node}")
            assert time.monotonic() < deadline, self.log(f"node{node}")()[-3000:]

    def online(self) -> int:
        listed = self.flwr("supernode", "list", "test", "--format", "json")
        text = listed.stdout[listed.stdout.find("{") :]
        return sum(node.get("status") == "online" for node in json.loads(text)["nodes"]) if text else 0

    def submit(self, **config: Any) -> str:
        settings = " ".join(f"{key.replace('_', '-')}={json.dumps(value)}" for key, value in config.items())
        done = self.flwr("run", ".", "test", "--run-config", settings, "--format", "json")
        assert "run-id" in done.stdout, done.stdout + done.stderr
        return str(json.loads(done.stdout[done.stdout.index("{") :])["run-id"])

    def status(self, run: str) -> str:
        listed = self.flwr("ls", "test", "--run-id", run, "--format", "json")
        return str(json.loads(listed.stdout[listed.stdout.index("{") :])["runs"][0]["status"])

    def finish(self, run: str, seconds: float = 240) -> str:
        """Wait until a run has ended; returns how."""
        wait_for(lambda: self.status(run).startswith(FINISHED), seconds, self.log("superlink"), pause=3.0)
        return self.status(run)

    def server_app(self) -> psutil.Process | None:
        """The process of the ServerApp that is running now."""
        found = [p for p in children(self.processes["superlink"].pid) if "flwr-serverapp" in " ".join(p.cmdline())]
        return found[0] if found else None


def children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    except OSError:
        return False


def wait_for(done: Callable[[], bool], seconds: float, log: Callable[[], str], pause: float = 0.3) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"nothing after {seconds} s:\n{log()[-6000:]}"
        time.sleep(pause)
