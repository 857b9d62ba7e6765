"""The real PostgreSQL (Debian's package): a server of its own in a folder of its own, on a socket and no port.

With `listen_addresses` among its options it listens, too: there everybody needs a password.
"""

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, LiteralString

import psycopg
import pytest
from psycopg import sql

from shoal_dev.lab.errors import LabError
from shoal_dev.lab.network import require_programs

_CLUSTERS = Path("/etc/postgresql-common/createcluster.conf")


class Postgres:
    """One server. It refuses to run as root, so it then runs as Debian's user `postgres`. `network`: a process whose
    network it has; None: this one's."""

    def __init__(self, folder: Path, binaries: Path, *options: str, network: int | None = None) -> None:
        self.folder = folder
        self._binaries = binaries
        self._data = folder / "data"
        self._options = options
        self._network = network
        self._databases = itertools.count(1)
        self._who: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(folder, user.pw_uid, user.pw_gid)
            self._who = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self._process: subprocess.Popen[Any] | None = None
        self._call("initdb", "-D", str(self._data), "-U", "shoal", "-A", "trust", "-E", "UTF8", "--no-locale", "-N")
        with (self._data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all all scram-sha-256\n")

    def start(self) -> None:
        """Returns when it takes connections."""
        options = ("listen_addresses=", f"unix_socket_directories={self.folder}", *self._options)
        command = [str(self._binaries / "postgres"), "-D", str(self._data)]
        if (setpriv := shutil.which("setpriv")) is not None:
            command = [setpriv, "--pdeathsig", "INT", *command]  # it ends with the tests, also when they are killed
        who = self._who
        if self._network is not None:
            # Only root may enter a network, so it is somebody else from there on.
            ids = [f"--reuid={who['user']}", f"--regid={who['group']}", "--clear-groups"] if who else []
            enter = ["nsenter", f"--target={self._network}", "--net", "--"]
            command, who = [*enter, *((setpriv or "setpriv", *ids) if ids else ()), *command], {}
        with (self.folder / "log").open("ab") as log:
            process = self._process = subprocess.Popen(
                [*command, *itertools.chain.from_iterable(("-c", option) for option in options)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder, **who,
            )  # fmt: skip
        deadline = time.monotonic() + 60
        while True:
            try:
                self._connect().close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends it at once, and whoever is connected with it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # "fast": sessions are ended, data is written
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGQUIT)
                self._process.wait(30)
            self._process = None

    def database(self) -> str:
        """URL of a new, empty database."""
        name = f"ledger{next(self._databases)}"
        with self._connect() as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return f"postgresql+psycopg://shoal@/{name}?host={self.folder}"

    def owned_database(self, name: str, password: str) -> None:
        """A database with an owner of the same name, who comes over the network with the password."""
        with self._connect() as connection:
            owner, secret = sql.Identifier(name), sql.Literal(password)
            connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(owner, secret))
            connection.execute(sql.SQL("CREATE DATABASE {} OWNER {}").format(owner, owner))

    def rows(self, database: str, query: LiteralString, *values: object) -> list[tuple[Any, ...]]:
        """What a query finds."""
        with self._connect(database) as connection:
            return connection.execute(query, values).fetchall()

    def dump(self, url: str, target: Path) -> None:
        """pg_dump, as docs/ledger.md says."""
        with target.open("wb") as out:
            self._run("pg_dump", "--format=custom", _libpq(url), stdout=out)

    def restore(self, url: str, source: Path) -> None:
        """pg_restore, as docs/ledger.md says."""
        with source.open("rb") as given:
            self._run("pg_restore", "--clean", "--if-exists", "--exit-on-error", "-d", _libpq(url), stdin=given)

    def _connect(self, database: str = "postgres") -> psycopg.Connection:
        return psycopg.connect(host=str(self.folder), user="shoal", dbname=database, autocommit=True)

    def _call(self, program: str, *arguments: str) -> None:
        self._run(program, *arguments, stdout=subprocess.DEVNULL)

    def _run(self, program: str, *arguments: str, **streams: Any) -> None:
        subprocess.run(
            [str(self._binaries / program), *arguments],
            check=True,
            timeout=120,
            cwd=self.folder,
            **streams,
            **self._who,
        )


@contextlib.contextmanager
def postgres(*options: str, network: int | None = None) -> Generator[Postgres]:
    """A server with `options`, such as "fsync=off"; ended and removed at the end. `network` as in `Postgres`."""
    binaries = _binaries()
    folder = Path(tempfile.mkdtemp(prefix="shoal-pg-"))  # not pytest's: the path of a socket is 107 characters at most
    try:
        server = Postgres(folder, binaries, *options, network=network)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server() -> Generator[Postgres]:
    """One server for all tests of a process; nothing here survives a power cut."""
    with postgres("fsync=off", "full_page_writes=off") as it:
        yield it


def _binaries() -> Path:
    """Where the server's programs are; the package is installed where it may be."""
    if (found := _newest()) is not None:
        return found
    if os.geteuid() == 0 and not _CLUSTERS.exists():
        # The package would make and start a server for the whole machine.
        _CLUSTERS.parent.mkdir(parents=True, exist_ok=True)
        _CLUSTERS.write_text("create_main_cluster = false\n")
    try:
        require_programs(print, {"pg_lsclusters": "postgresql"})
    except LabError as error:
        pytest.skip(f"the real PostgreSQL is not to be had here: {error}")
    if (found := _newest()) is None:
        pytest.skip("the real PostgreSQL is not to be had here: no server in /usr/lib/postgresql")
    return found


def _newest() -> Path | None:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    program = found[-1] if found else shutil.which("postgres")
    return Path(program).resolve().parent if program else None


def _libpq(url: str) -> str:
    return url.replace("postgresql+psycopg://", "postgresql://")
