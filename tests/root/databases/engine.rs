//! Databases with a common interface for tests: created in a folder, started, written to, counted,
//! held.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;

use super::process::{Client, Daemon, Writer, as_nobody, folder, program};

/// A database.
#[derive(Clone, Copy, Debug)]
pub enum Engine {
    PostgreSql,
    MariaDb,
    /// With an append-only file, or only written out by SAVE.
    Redis {
        append_only: bool,
    },
}

/// A running database.
pub struct Run {
    engine: Engine,
    /// The folder of its socket and log.
    folder: PathBuf,
    daemon: Daemon,
}

pub fn postgresql(name: &str) -> PathBuf {
    let versions = (13..40)
        .rev()
        .map(|n| format!("/usr/lib/postgresql/{n}/bin/{name}"));
    let versions: Vec<String> = versions.collect();
    program(&versions.iter().map(String::as_str).collect::<Vec<_>>())
}

impl Engine {
    /// The name of its session's program.
    pub fn name(self) -> &'static str {
        match self {
            Engine::PostgreSql => "postgresql",
            Engine::MariaDb => "mariadb",
            Engine::Redis { .. } => "redis",
        }
    }

    /// Creates an empty database, as the unprivileged user, in a folder that does not exist yet.
    pub fn make(self, data: &Path, more: &[&str]) {
        let parent = data.parent().unwrap();
        let mut command = match self {
            Engine::PostgreSql => {
                let mut command = as_nobody(&postgresql("initdb"), parent);
                command.args(["--username=postgres", "--auth=trust", "--no-sync"]);
                command
                    .arg("--no-instructions")
                    .arg("--locale=C")
                    .arg("--pgdata")
                    .arg(data);
                command
            }
            Engine::MariaDb => {
                let install = program(&["/usr/bin/mariadb-install-db"]);
                let mut command = as_nobody(&install, parent);
                command
                    .arg("--no-defaults")
                    .arg("--skip-test-db")
                    .arg(with("--datadir=", data));
                command.args([
                    "--auth-root-authentication-method=normal",
                    "--skip-name-resolve",
                ]);
                command.args([
                    "--innodb-flush-log-at-trx-commit=0",
                    "--innodb-log-file-size=8M",
                ]);
                command
            }
            Engine::Redis { .. } => {
                folder(data);
                return;
            }
        };
        let output = command.args(more).stdin(Stdio::null()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        let message = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success(),
            "{self:?} is made: {message}\n{stderr}"
        );
    }

    fn command(self, data: &Path, run: &Path) -> Command {
        match self {
            Engine::PostgreSql => {
                let mut command = as_nobody(&postgresql("postgres"), run);
                command.arg("-D").arg(data).arg("-k").arg(run);
                command.args(["-c", "listen_addresses=", "-c", "shared_buffers=16MB"]);
                // Otherwise a start after a crash syncs every file by itself.
                command.args(["-c", "recovery_init_sync_method=syncfs"]);
                command
            }
            Engine::MariaDb => {
                let server = program(&["/usr/sbin/mariadbd"]);
                let mut command = as_nobody(&server, run);
                command.arg("--no-defaults").arg(with("--datadir=", data));
                command.arg(with("--socket=", &run.join("socket")));
                command.args(["--skip-networking", "--innodb-log-file-size=8M"]);
                command.args(["--innodb-buffer-pool-size=16M", "--skip-name-resolve"]);
                command
            }
            Engine::Redis { append_only } => {
                use std::os::unix::process::CommandExt;
                // Debian's redis-tools contains the server, which selects its role by the name it
                // is called with.
                let server = program(&["/usr/bin/redis-server", "/usr/bin/redis-check-rdb"]);
                let mut command = as_nobody(&server, run);
                command
                    .arg0("redis-server")
                    .args(["--port", "0", "--save", "", "--dir"]);
                command
                    .arg(data)
                    .arg("--unixsocket")
                    .arg(run.join("socket"));
                command.args(["--appendonly", if append_only { "yes" } else { "no" }]);
                command
            }
        }
    }

    /// Starts it, and waits until it answers. Returns its output if it ended instead.
    pub fn start(self, data: &Path, run: &Path, more: &[&str]) -> Result<Run, String> {
        folder(run);
        let stop = match self {
            // "Immediate": its processes and shared memory end without writing anything out.
            Engine::PostgreSql => Signal::SIGQUIT,
            Engine::MariaDb | Engine::Redis { .. } => Signal::SIGKILL,
        };
        let mut command = self.command(data, run);
        command.args(more);
        let daemon = Daemon::start(command, stop, &run.join("log"));
        let mut run = Run {
            engine: self,
            folder: run.to_path_buf(),
            daemon,
        };
        let mut ended = false;
        slackwater_testkit::eventually("a database starts", || {
            ended = run.daemon.has_ended();
            ended || run.client().ask_once(self.hello().0) == self.hello().1
        });
        if ended { Err(run.log()) } else { Ok(run) }
    }

    fn hello(self) -> (&'static str, &'static str) {
        match self {
            Engine::PostgreSql | Engine::MariaDb => ("SELECT 1;", "1"),
            Engine::Redis { .. } => ("PING", "PONG"),
        }
    }
}

fn with(flag: &str, path: &Path) -> OsString {
    let mut word = OsString::from(flag);
    word.push(path);
    word
}

impl Run {
    /// Its log.
    pub fn log(&self) -> String {
        self.daemon.log()
    }

    /// The connection parameters as arguments of its client program and its session.
    pub fn words(&self) -> Vec<OsString> {
        let socket = self.folder.join("socket");
        match self.engine {
            Engine::PostgreSql => {
                vec![with("--host=", &self.folder), "--username=postgres".into()]
            }
            Engine::MariaDb => vec![
                "--no-defaults".into(),
                with("--socket=", &socket),
                "--user=root".into(),
            ],
            Engine::Redis { .. } => vec!["-s".into(), socket.into()],
        }
    }

    /// A client that answers a line with a line.
    pub fn client(&self) -> Client {
        let (name, more): (_, &[&str]) = match self.engine {
            Engine::PostgreSql => ("/usr/bin/psql", &["-XqAt", "--set=ON_ERROR_STOP=1"]),
            Engine::MariaDb => {
                let more = &["--batch", "--skip-column-names", "--unbuffered"];
                ("/usr/bin/mariadb", more)
            }
            Engine::Redis { .. } => ("/usr/bin/redis-cli", &[]),
        };
        let mut command = as_nobody(&program(&[name]), &self.folder);
        command.args(self.words()).args(more);
        Client::start(command)
    }

    /// Writes rows with the IDs 1, 2, 3 ..., each in a transaction of its own.
    pub fn writer(&self) -> Writer {
        let mut client = self.client();
        let make = match self.engine {
            Engine::PostgreSql => Some("CREATE TABLE log (id bigint PRIMARY KEY); SELECT 1;"),
            Engine::MariaDb => {
                Some("CREATE DATABASE db; CREATE TABLE db.log (id bigint PRIMARY KEY); SELECT 1;")
            }
            Engine::Redis { .. } => None,
        };
        if let Some(make) = make {
            assert_eq!(client.ask(make).as_deref(), Some("1"));
        }
        let engine = self.engine;
        Writer::start(client, move |number| match engine {
            Engine::PostgreSql => format!("INSERT INTO log VALUES ({number}) RETURNING id;"),
            Engine::MariaDb => format!("INSERT INTO db.log VALUES ({number}); SELECT {number};"),
            Engine::Redis { .. } => format!("RPUSH log {number}"),
        })
    }

    /// Sends a line to its client, and ignores the answer.
    pub fn tell(&self, line: &str) {
        let answer = self.client().ask_once(&format!("{line} SELECT 'done';"));
        assert!(answer.contains("done"), "{line}: {answer}; {}", self.log());
    }

    /// The last row at the moment; more may follow.
    pub fn last(&self) -> u64 {
        let line = match self.engine {
            Engine::PostgreSql => "SELECT coalesce(max(id), 0) FROM log;",
            Engine::MariaDb => "SELECT coalesce(max(id), 0) FROM db.log;",
            Engine::Redis { .. } => "LINDEX log -1",
        };
        // A replica may not have the table yet.
        let last = self.client().ask(line);
        last.and_then(|last| last.parse().ok()).unwrap_or(0)
    }

    /// The number of rows, which must have consecutive IDs.
    pub fn count(&self) -> u64 {
        let mut client = self.client();
        let mut ask = |line: &str| client.ask(line).unwrap().parse::<u64>().unwrap();
        let (count, last) = match self.engine {
            Engine::PostgreSql => (
                ask("SELECT count(*) FROM log;"),
                ask("SELECT coalesce(max(id), 0) FROM log;"),
            ),
            Engine::MariaDb => (
                ask("SELECT count(*) FROM db.log;"),
                ask("SELECT coalesce(max(id), 0) FROM db.log;"),
            ),
            Engine::Redis { .. } => (ask("LLEN log"), ask("LINDEX log -1")),
        };
        assert_eq!(count, last, "no row is missing");
        count
    }
}
