//! The sessions in deploy/examples/hooks on a replica that follows a primary under load: the
//! replica applies nothing between READY and release, and follows again in every case.

use std::net::TcpListener;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, killpg};

use super::engine::{Engine, Run};
use super::process::{Writer, as_nobody, folder, open_to_nobody};
use super::sessions::Session;
use slackwater_testkit::{Scratch, eventually};

struct Pair {
    engine: Engine,
    scratch: Scratch,
    primary: Run,
    replica: Run,
    writer: Writer,
}

/// A port that was free a moment ago.
fn port() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port().to_string()
}

fn replicates(engine: Engine) -> Pair {
    let scratch = Scratch::new();
    open_to_nobody(&scratch);
    let files = folder(&scratch.join("files"));
    let (first, second) = (files.join("first"), files.join("second"));
    let run = |name: &str| scratch.join(name);
    let (primary, replica) = match engine {
        Engine::PostgreSql => {
            engine.make(&first, &[]);
            let primary = engine.start(&first, &run("run"), &[]).unwrap();
            base_backup(&primary, &second, &files);
            let replica = engine.start(&second, &run("run-replica"), &[]).unwrap();
            (primary, replica)
        }
        Engine::MariaDb => {
            let port = format!("--port={}", port());
            let more = ["--skip-networking=0", "--bind-address=127.0.0.1", &port];
            let more = [&more[..], &["--server-id=1", "--log-bin=log"]].concat();
            engine.make(&first, &[]);
            let primary = engine.start(&first, &run("run"), &more).unwrap();
            primary.tell("CREATE USER follower@'127.0.0.1'; GRANT REPLICATION SLAVE ON *.* TO follower@'127.0.0.1';");
            engine.make(&second, &[]);
            let more = ["--server-id=2", "--read-only"];
            let replica = engine.start(&second, &run("run-replica"), &more).unwrap();
            let port = port.trim_start_matches("--port=");
            replica.tell(&format!(
                "CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={port}, MASTER_USER='follower', MASTER_USE_GTID=slave_pos; START SLAVE;"
            ));
            (primary, replica)
        }
        Engine::Redis { .. } => {
            let port = port();
            engine.make(&first, &[]);
            let primary = engine.start(&first, &run("run"), &["--port", &port]);
            engine.make(&second, &[]);
            let more = ["--replicaof", "127.0.0.1", &port];
            let replica = engine.start(&second, &run("run-replica"), &more);
            (primary.unwrap(), replica.unwrap())
        }
    };
    let writer = primary.writer();
    writer.goes_beyond(100);
    Pair {
        engine,
        scratch,
        primary,
        replica,
        writer,
    }
}

fn base_backup(primary: &Run, data: &Path, folder: &Path) {
    let mut command = as_nobody(&super::engine::postgresql("pg_basebackup"), folder);
    command.args(primary.words()).arg("--pgdata").arg(data);
    command.args(["--write-recovery-conf", "--checkpoint=fast", "--no-sync"]);
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

impl Pair {
    /// The replica catches up with what the primary has acknowledged by now.
    fn follows(&self) {
        let wanted = self.writer.acknowledged() + 10;
        self.writer.goes_beyond(wanted);
        eventually("the replica follows", || self.replica.last() >= wanted);
    }

    /// The replica applies nothing, while its primary continues.
    fn assert_held(&self) {
        let before = self.replica.last();
        self.writer.goes_beyond(self.writer.acknowledged() + 10);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(self.replica.last(), before);
        assert_eq!(self.replica.count(), before, "reads go on");
    }
}

fn sessions_on_a_replica_of(engine: Engine) {
    let pair = replicates(engine);
    pair.follows();

    let mut session = Session::ready(&pair.replica, pair.engine, &pair.scratch);
    pair.assert_held();
    drop(session.stdin.take());
    assert!(session.end().success());
    pair.follows();

    // No process releases it, so it releases at its deadline.
    let session = Session::ready_shortly(&pair.replica, pair.engine, &pair.scratch);
    pair.assert_held();
    assert!(!session.end().success());
    pair.follows();

    // The whole session is killed.
    let session = Session::ready_shortly(&pair.replica, pair.engine, &pair.scratch);
    pair.assert_held();
    killpg(session.pid(), Signal::SIGKILL).unwrap();
    drop(session);
    pair.follows();

    let acknowledged = pair.writer.stop();
    assert_eq!(pair.primary.count(), acknowledged);
    eventually("the replica has caught up", || {
        pair.replica.last() == acknowledged
    });
    assert_eq!(pair.replica.count(), acknowledged);
}

#[test]
fn the_session_of_postgresql_holds_the_replay_of_a_standby() {
    sessions_on_a_replica_of(Engine::PostgreSql);
}

/// An administrator's pause stays when the session ends.
#[test]
fn the_session_of_postgresql_leaves_a_replay_that_was_paused_before_paused() {
    let pair = replicates(Engine::PostgreSql);
    pair.follows();
    let state = || {
        pair.replica
            .client()
            .ask("SELECT pg_get_wal_replay_pause_state();")
    };
    pair.replica.tell("SELECT pg_wal_replay_pause();");
    eventually("the replica pauses", || {
        state().as_deref() == Some("paused")
    });
    let mut session = Session::ready(&pair.replica, pair.engine, &pair.scratch);
    drop(session.stdin.take());
    assert!(session.end().success());
    assert_eq!(state().as_deref(), Some("paused"));
    pair.replica.tell("SELECT pg_wal_replay_resume();");
    pair.follows();
}

#[test]
fn the_session_of_mariadb_stops_a_replica_from_applying() {
    sessions_on_a_replica_of(Engine::MariaDb);
}

#[test]
fn the_session_of_redis_stops_a_replica_from_applying() {
    for append_only in [true, false] {
        sessions_on_a_replica_of(Engine::Redis { append_only });
    }
}
